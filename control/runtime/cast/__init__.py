"""Casts to many receivers: down a tree of their own processes, and the replies back up."""
