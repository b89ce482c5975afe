"""One-sided transfers: other processes read and write memory of one process, over the fastest usable backend."""

if __name__ != "skipper.dataplane":  # imported by the folder's own name, as a second copy of the package
    raise ImportError("write `from skipper import dataplane`, or `from skipper.dataplane import ...`", name=__name__)


from skipper.dataplane.action import RDMAAction
from skipper.dataplane.allocation import empty, empty_array, is_shared, memcpy, release_pages
from skipper.dataplane.backends.base import BackendStatus
from skipper.dataplane.buffer import RDMABuffer
from skipper.dataplane.errors import (
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
from skipper.dataplane.identity import OwnerId
from skipper.dataplane.layout import RemoteLayout
from skipper.dataplane.metering import Traffic
from skipper.dataplane.operation import FetchOperation, Operation
from skipper.dataplane.settings import backends, configure, get_rdma_backend, is_ibverbs_available, traffic

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
