"""Skipper beside what else does the same work: one script a peer, in turns, each in an environment of its own.

``python -m skipper.benchmarks.peers`` or ``make bench-peers``; `docs/performance.md` says what is measured, and how.
"""
