"""Certificates of versions, and proofs that a process holds the certified bytes."""
