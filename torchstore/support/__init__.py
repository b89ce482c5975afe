"""What both sides of a store use: deadlines, records, processes, coroutines."""
