"""Names of transports, for callers of Meta's torchstore; here nothing depends on them.

Which way the bytes take is found out for each pair of processes by `dataplane`: shared memory, UCX or verbs.
"""

from skipper.torchstore.transport.kinds import TransportType
from skipper.torchstore.transport.types import Request, TensorSlice

__all__ = ["Request", "TensorSlice", "TransportType"]
