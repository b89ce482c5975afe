"""Certificates of versions, and proofs that a process holds what they say."""
