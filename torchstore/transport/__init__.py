"""Names of transports, for callers of Meta's torchstore; nothing here depends on them.

`dataplane` selects the backend for each pair of processes: shared memory, CUDA IPC, UCX or verbs.
"""

from skipper.torchstore.transport.kinds import TransportType
from skipper.torchstore.transport.types import Request, TensorSlice

__all__ = ["Request", "TensorSlice", "TransportType"]
