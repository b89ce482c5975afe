"""The backends that reach memory, one file or folder each, behind the interface of `base`.

UCX and verbs share `handshake`: the proofs that two processes exchange before a connection.
"""
