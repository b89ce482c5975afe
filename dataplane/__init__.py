"""One-sided transfers: memory of one process, read and written by others, over whatever moves it fastest."""

from dataplane.action import RDMAAction
from dataplane.allocation import empty_array, is_shared, memcpy
from dataplane.atomic import FetchOperation
from dataplane.backends.base import BackendStatus
from dataplane.buffer import RDMABuffer
from dataplane.errors import (
    BackendUnavailableError,
    BufferDroppedError,
    ConfigurationError,
    DataplaneError,
    DescriptorError,
    OwnerDiedError,
    RegistrationError,
    TransferError,
    TransferTimeoutError,
)
from dataplane.identity import OwnerId
from dataplane.layout import RemoteLayout
from dataplane.operation import Operation
from dataplane.settings import backends, configure, get_rdma_backend, is_ibverbs_available
from dataplane.tensors import empty

__all__ = [
    "RDMABuffer",
    "RDMAAction",
    "RemoteLayout",
    "Operation",
    "FetchOperation",
    "OwnerId",
    "empty",
    "empty_array",
    "is_shared",
    "memcpy",
    "configure",
    "backends",
    "BackendStatus",
    "get_rdma_backend",
    "is_ibverbs_available",
    "DataplaneError",
    "ConfigurationError",
    "BackendUnavailableError",
    "RegistrationError",
    "DescriptorError",
    "BufferDroppedError",
    "TransferError",
    "OwnerDiedError",
    "TransferTimeoutError",
]
