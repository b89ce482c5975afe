"""What runs in the processes that put and get."""
