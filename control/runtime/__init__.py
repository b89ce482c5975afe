"""The runtime of one process: its actors' threads, its children, its tables. The only place with threads."""
