"""Memory that processes read from each other: volumes, the board of small values, shared parameters."""
