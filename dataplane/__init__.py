"""One-sided transfers: memory of one process, read and written by others, over whatever moves it fastest."""

from dataplane.action import RDMAAction
from dataplane.allocation import empty_array, is_shared, memcpy, release_pages
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
from dataplane.metering import Traffic
from dataplane.operation import Operation
from dataplane.settings import backends, configure, get_rdma_backend, is_ibverbs_available, traffic
from dataplane.tensors import empty

__all__ = [
    # buffers and transfers
    "RDMABuffer",
    "RDMAAction",
    "RemoteLayout",
    "Operation",
    "FetchOperation",
    "OwnerId",
    # memory
    "empty",
    "empty_array",
    "is_shared",
    "release_pages",
    "memcpy",
    # backends
    "configure",
    "backends",
    "BackendStatus",
    "traffic",
    "Traffic",
    "get_rdma_backend",
    "is_ibverbs_available",
    # errors
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
