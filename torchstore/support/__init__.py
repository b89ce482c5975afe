"""Helpers for all parts of the store: deadlines, calls, records, processes, coroutines."""
