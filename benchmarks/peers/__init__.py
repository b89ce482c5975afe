"""Skipper and other libraries do the same work, in turns: each has a script and an environment of its own.

``python -m skipper.benchmarks.peers`` or ``make bench-peers``; `docs/performance.md` says what is measured, and how.
"""
