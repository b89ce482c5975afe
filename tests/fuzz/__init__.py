"""Fuzzing of everything that takes bytes of others: `make fuzz`, `python -m tests.fuzz`."""
