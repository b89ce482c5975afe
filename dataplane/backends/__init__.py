"""The ways to reach memory, one file or folder each behind the interface of `base`.

`handshake` is what UCX and verbs share: the proofs that two processes exchange before a connection.
"""
