"""`TransportType`: the names of Meta's torchstore for the transports between a client and a volume."""

from __future__ import annotations

from enum import Enum, auto


class TransportType(Enum):
    """A transport between a client and a volume. Strategies accept one, but `dataplane` selects the backend.

    Example:
        ```python
        from skipper.torchstore import HostStrategy
        from skipper.torchstore.transport import TransportType

        strategy = HostStrategy(TransportType.Unset)  # accepted, and not needed
        ```
    """

    Unset = auto()
    MonarchRPC = auto()
    MonarchRDMA = auto()
    TorchComms = auto()
    TorchCommsRDMA = TorchComms
    Gloo = auto()
    NIXL = auto()
    XCCL = auto()
    SharedMemory = auto()
    Rdma4Py = auto()


def check_transport(given: object) -> TransportType:
    """The transport, if it is one.

    Raises:
        TypeError: It is something else.
    """
    if not isinstance(given, TransportType):
        names = ", ".join(kind.name for kind in TransportType)
        raise TypeError(f"default_transport_type is a TransportType ({names}), not {given!r}")
    return given
