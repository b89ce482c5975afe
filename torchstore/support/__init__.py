"""What every room of the store uses: deadlines, calls, records, processes, coroutines."""
