"""Queue pairs connected by the RDMA connection manager (rdma_cm) instead of directly.

On some fabrics the path to a peer must be queried, which the connection manager does. The usual handshake (`handshake`)
decides which processes may connect: it ends with a *ticket*, which only these two sides can compute, valid for one
connection of one queue pair. The connection manager's request carries it as private data.

The queue pairs are "external" to the manager. pyverbs' calls that wait for an event hold the GIL. So they are made on a
non-blocking descriptor, once it has an event.
"""

import hmac
import ipaddress
import logging
import os
import random
import select
import threading
import time
from typing import Any

from skipper.dataplane.backends.verbs.device import ENDPOINT, Device, QueuePair, descriptors_of, pyverbs
from skipper.dataplane.errors import BackendUnavailableError, TransferError, TransferTimeoutError

_LOG = logging.getLogger(__name__)

_EVENTS = "/dev/infiniband/rdma_cm"
_PORTS = range(49152, 65536)
_TRIES = 64
_BACKLOG = 128
_TICKET = 32
_opening = threading.Lock()


class CmEventChannel:
    """An event channel with a known, non-blocking descriptor."""

    def __init__(self) -> None:
        """Open it.

        Raises:
            TransferError: The kernel has no connection manager, or no descriptor is left.
        """
        try:
            with _opening:  # the descriptor can only be found by looking for a new one
                known = descriptors_of(_EVENTS)
                self.channel = pyverbs("cmid").CMEventChannel()
                (self.fd,) = descriptors_of(_EVENTS) - known
        except (_error(), OSError) as error:
            raise TransferError(f"the RDMA connection manager cannot be reached: {error}") from error
        os.set_blocking(self.fd, False)

    def event(self, wanted: str, deadline: float) -> Any:
        """The next event, to be closed.

        Raises:
            TransferError: It is not the wanted one.
            TransferTimeoutError: The deadline (CLOCK_MONOTONIC) passed.
        """
        if not self.wait(max(0.0, deadline - time.monotonic())):
            raise TransferTimeoutError("the deadline passed before the RDMA connection manager had connected")
        event = pyverbs("cmid").CMEvent(self.channel)
        if event.event_type != getattr(pyverbs("cm_enums"), f"RDMA_CM_EVENT_{wanted}"):
            text = event.event_str()
            event.close()
            raise TransferError(f"the RDMA connection manager answers with {text}")
        return event

    def wait(self, seconds: float | None) -> bool:
        """Sleep until there is an event, or for that time; returns whether there is one."""
        sleeper = select.poll()
        sleeper.register(self.fd, select.POLLIN)
        return bool(sleeper.poll(None if seconds is None else seconds * 1000))

    def close(self) -> None:
        """Close it. Idempotent."""
        self.channel.close()


def ticket(key: bytes, initiator: bytes, owner: bytes) -> bytes:
    """Lets one queue pair connect to one other; only processes with the key of their handshake can make it."""
    return hmac.digest(key, b"ticket" + initiator + owner, "sha256")


def managed(endpoint: bytes) -> bool:
    """Whether that side wants a connection through its connection manager."""
    return bool(ENDPOINT.unpack(endpoint)[-1])


def connect(pair: QueuePair, device: Device, theirs: bytes, proof: bytes, deadline: float) -> None:
    """Connect a queue pair to the one that `theirs` describes.

    Raises:
        TransferError: The owner refuses, or there is no path.
        TransferTimeoutError: The deadline (CLOCK_MONOTONIC) passed.
    """
    channel = CmEventChannel()
    try:
        identity = _resolved(channel, device, theirs, deadline)
        pair.hold(identity, channel)
        e = device.enums
        pair.follow(identity, e.IBV_QPS_INIT)
        identity.connect(_parameters(device, pair, proof))
        channel.event("CONNECT_RESPONSE", deadline).close()
        pair.follow(identity, e.IBV_QPS_RTR)
        pair.follow(identity, e.IBV_QPS_RTS)
        identity.establish()
    except device.error as error:
        raise TransferError(f"{device.port} cannot be connected by the RDMA connection manager: {error}") from error


def _resolved(channel: CmEventChannel, device: Device, theirs: bytes, deadline: float) -> Any:
    cmid, enums = pyverbs("cmid"), pyverbs("cm_enums")
    space = enums.RDMA_PS_TCP
    *_, gid, _, _, _, port = ENDPOINT.unpack(theirs)
    route = cmid.AddrInfo(src=address_of(device), dst=_text(gid), dst_service=str(port), port_space=space)
    identity = cmid.CMID(creator=channel.channel, port_space=space)
    patience_ms = max(1, int(1000 * (deadline - time.monotonic())))
    identity.resolve_addr(route, patience_ms)
    channel.event("ADDR_RESOLVED", deadline).close()
    identity.resolve_route(patience_ms)
    channel.event("ROUTE_RESOLVED", deadline).close()
    return identity


def _parameters(device: Device, pair: QueuePair, data: bytes) -> Any:
    made = pyverbs("cmid").ConnParam(
        resources=device.reads,
        depth=device.reads,
        retry=device.retries,
        rnr_retry=device.retries,
        qp_num=pair.number,
        data_len=len(data),
    )
    made.set_private_data(data)
    return made


class ConnectionManager:
    """The owner's side, for one device: accepts connections with an expected ticket. One daemon thread.

    Attributes:
        port: Where it listens.
    """

    def __init__(self, device: Device) -> None:
        """Listen.

        Raises:
            BackendUnavailableError: It cannot listen.
        """
        self._device = device
        self._lock = threading.Lock()
        self._expected: dict[bytes, QueuePair] = {}
        try:
            self._channel = CmEventChannel()
            self._identity, self.port = self._listening()
        except (device.error, TransferError) as error:
            raise BackendUnavailableError(f"rdma_cm cannot be used with {device.port}: {error}") from error
        threading.Thread(target=self._serve, name="dataplane-verbs-cm", daemon=True).start()

    def expect(self, proof: bytes, pair: QueuePair) -> None:
        """Let a connection with this ticket reach that queue pair, once."""
        with self._lock:
            self._expected[proof] = pair

    def forget(self, pair: QueuePair) -> None:
        """Allow no more connections to it. Idempotent."""
        with self._lock:
            self._expected = {proof: other for proof, other in self._expected.items() if other is not pair}

    def _listening(self) -> tuple[Any, int]:
        cmid, enums = pyverbs("cmid"), pyverbs("cm_enums")
        space, last = enums.RDMA_PS_TCP, None
        for _ in range(_TRIES):
            port = random.choice(_PORTS)  # pyverbs does not report which one the kernel would choose
            where = cmid.AddrInfo(
                src=address_of(self._device), src_service=str(port), port_space=space, flags=enums.RAI_PASSIVE
            )
            identity = cmid.CMID(creator=self._channel.channel, port_space=space)
            try:
                identity.bind_addr(where)
                identity.listen(_BACKLOG)
            except self._device.error as error:
                identity.close()
                last = error
                continue
            return identity, port
        raise BackendUnavailableError(f"rdma_cm finds no free port on {self._device.port}: {last}")

    def _serve(self) -> None:
        enums = pyverbs("cm_enums")
        while True:
            self._channel.wait(None)
            try:
                event = pyverbs("cmid").CMEvent(self._channel.channel)
            except self._device.error:
                continue  # the request is gone again
            try:
                if event.event_type == enums.RDMA_CM_EVENT_CONNECT_REQUEST:
                    self._meet(event)
            except (self._device.error, TransferError) as error:
                _LOG.warning("a queue pair of %s could not be connected: %s", self._device.port, error)
            finally:
                event.close()

    def _meet(self, event: Any) -> None:
        cmid, e = pyverbs("cmid"), self._device.enums
        identity = cmid.CMID(creator=event, listen_id=self._identity)
        with self._lock:
            pair = self._expected.pop(bytes(event.private_data or b"")[:_TICKET], None)
            if pair is not None and pair.hold(identity, None):
                for state in (e.IBV_QPS_INIT, e.IBV_QPS_RTR, e.IBV_QPS_RTS):
                    pair.follow(identity, state)
                identity.accept(_parameters(self._device, pair, b""))
                return
        identity.reject()
        identity.close()


def address_of(device: Device) -> str:
    """The IP address of a port, by which the connection manager knows it.

    Raises:
        TransferError: Its GID contains none.
    """
    return _text(device.gid)


def _text(gid: bytes) -> str:
    address = ipaddress.IPv6Address(gid)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    if address.is_link_local:
        raise TransferError(f"the RDMA connection manager needs an IP address; the GID {address} is not one")
    return str(address)


def _error() -> type[Exception]:
    error: type[Exception] = pyverbs("pyverbs_error").PyverbsError
    return error
