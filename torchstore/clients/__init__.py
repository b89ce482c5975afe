"""The code that runs in the processes that put and get."""
