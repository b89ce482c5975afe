"""Casts to many receivers: down a tree of the receivers' processes, and the replies back up."""
