"""One script a peer: how it does the rows of `benchmarks.peers.work`. They run in `benchmarks.peers.child`.

Each is written as its peer's documentation would have a user write it, with what makes it fast where that is a matter
of options, and imports nothing of the others.
"""
