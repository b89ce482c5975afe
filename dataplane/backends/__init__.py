"""The ways to another process's memory, one file each behind the interface of `base`."""
