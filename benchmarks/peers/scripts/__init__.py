"""One script a peer: how it does the rows of `benchmarks.peers.work`. They run in `benchmarks.peers.child`.

Each script uses its peer as the peer's documentation recommends, with the options that make it fast, and imports
nothing from the scripts of other peers.
"""
