"""The connections to one owner, one for each client worker in use.

A broken connection is made again. A connection keeps the keys that were unpacked for it.
"""

import functools
import itertools
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from skipper.dataplane import memfd
from skipper.dataplane.backends.handshake import WireUpKeys
from skipper.dataplane.backends.ucx.admission import Admission, Contact
from skipper.dataplane.backends.ucx.card import Traits, UcxCard
from skipper.dataplane.backends.ucx.engine import ClientWorker, UcxEngine
from skipper.dataplane.errors import OwnerDiedError, TransferError, TransferTimeoutError
from skipper.dataplane.handle import Card
from skipper.dataplane.identity import OwnerId, ProcessWatch, host_id

if TYPE_CHECKING:
    from types import ModuleType

    from skipper.dataplane.backends.ucx import _ucp

_UNREACHABLE = -6  # UCS_ERR_UNREACHABLE of ucs/type/status.h
_NOTHING_IN_COMMON = (
    "the two have no transport of UCX in common. Over TCP both must name network devices, and where one chooses its "
    "transports (TLS) the other must have one of them: dataplane.configure(ucx={...})"
)
_FIRST, _SECOND = (0,), (1,)
_CLIENT_BYTES = 4 << 20  # waking another thread does not pay for less
_KEYS = 16384  # unpacked keys kept per connection
_TOLD = 64

_ANSWERED_S = 1.0  # for the owner's first answer; then another worker tries, with twice as much
_ENDED_S = 1.0  # for the operations in flight on a closed connection
_SPIN_S = 100e-6
_LOOK_S = 0.0005
_NO_WORD = 0  # no buffer has its epoch word at this address: the owner says so, and does nothing

# With only these, UCX emulates copies of host memory: the owner's process itself touches it, at any given address.
# Transports for GPU memory exist on every host with a GPU, and do not help.
_EMULATING = frozenset(
    {"tcp", "posix", "sysv", "ud_verbs", "ud_mlx5", "cuda_copy", "cuda_ipc", "gdr_copy", "rocm_copy", "rocm_ipc"}
)

Unpacked = tuple["_ucp.UcpEndpoint", tuple["_ucp.RemoteKey", ...], ClientWorker]
"""The endpoint of an operation, the keys for it, and the client worker that it belongs to."""


@dataclass(slots=True)
class RemoteKeys:
    """Packed keys of an owner's memory, and the unpacked keys for each connection.

    Attributes:
        packed: The keys, as the owner's UCX has packed them.
        page: The page of the epoch word, if it is mapped here. This and the following are for a single registration.
        far_word: The word's address in the owner.
        way: The path for short copies, and the worker that it belongs to.
        way_told: How many connections had been given up when `way` was made.
        unpacked: The unpacked keys, by connection.
    """

    packed: tuple[bytes, ...]
    page: memfd.Mapping | None = None
    far_word: int = 0
    way: "tuple[_ucp.Way, ClientWorker] | None" = None
    way_told: int = 0
    unpacked: "dict[UcxConnection, Unpacked]" = field(default_factory=dict)


class AbandonedConnections:
    """The numbers of the latest connections to one owner that were given up. Thread-safe.

    Data of such a connection may still be in a socket, until a link recovers or an owner continues. They must not
    overwrite later writes, so the owner is told to ignore them before anything else is sent.

    Attributes:
        count: How many were ever given up.
    """

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()
        self._last: deque[int] = deque(maxlen=_TOLD)

    def note(self, number: int) -> None:
        """Add a connection, if it was not added before."""
        with self._lock:
            if number not in self._last:
                self._last.append(number)
                self.count += 1

    def last(self) -> tuple[int, list[int]]:
        """The count, and the numbers that the owner should know."""
        with self._lock:
            return self.count, list(self._last)


class UcxConnection:
    """The connection of one client worker to one owner. Thread-safe. Nothing is connected before the first use.

    Attributes:
        emulated: Whether no transport of it reaches the owner's memory by itself; known once connected.
        over_tcp: Whether bytes travel over TCP, for that reason.
    """

    def __init__(
        self,
        ucp: "ModuleType",
        client: ClientWorker,
        worker_address: bytes,
        contact: Contact | None,
        wire_up_keys: WireUpKeys,
        abandoned: AbandonedConnections,
        replace_client: Callable[[ClientWorker], ClientWorker],
        *,
        far: bool,
    ) -> None:
        """Prepare the connection of a client worker to an owner's worker.

        Args:
            ucp: The binding.
            client: The client worker.
            worker_address: Of the owner.
            contact: Where to ask before connecting over TCP; None if the owner does not listen on TCP.
            wire_up_keys: For the handshake there.
            abandoned: The connections to this owner that were given up.
            replace_client: Returns another client worker for the same purpose.
            far: Whether the owner is on another host. Within the host TCP is used only if one side has nothing else.
        """
        self._client = client
        self._leave_client = client.join(self)
        self._replace_client = replace_client
        self._used_tcp = False
        self.emulated = self.over_tcp = False
        self._abandoned = abandoned
        self._told = 0
        self._ucp = ucp
        self._worker_address = worker_address
        self._contact = contact
        self._wire_up_keys = wire_up_keys
        self._asks_first = contact is not None and (far or contact.within_host)
        self._lock = threading.Lock()
        self._endpoint: _ucp.UcpEndpoint | None = None
        self._unpacked: OrderedDict[bytes, _ucp.RemoteKey] = OrderedDict()

    def ready(self, keys: RemoteKeys, require_owner: Callable[[], None], deadline: float) -> Unpacked:
        """The endpoint that works, with these keys unpacked for it.

        Args:
            keys: The keys that the caller needs.
            require_owner: Called before a new connection; raises if the owner is gone.
            deadline: On CLOCK_MONOTONIC.

        Raises:
            UcxError: No connection can be made.
            TransferError: The owner does not let this process connect.
            TransferTimeoutError: The deadline passed before the owner had answered.
        """
        known = keys.unpacked.get(self)
        # A replaced endpoint was closed before.
        if known is not None and known[0].usable and self._told == self._abandoned.count:
            return known
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise TransferTimeoutError(
                "the deadline passed before the owner had accepted the connection of this process"
            )
        try:
            endpoint = self._endpoint
            if endpoint is None or not endpoint.usable:
                require_owner()
                self._unpacked.clear()
                if endpoint is not None:
                    endpoint.close()
                    self._abandoned.note(endpoint.number)
                endpoint = self._endpoint = self._connect(deadline)
            if self._told != self._abandoned.count:
                self._told, numbers = self._abandoned.last()
                endpoint.forget(numbers)
            unpacked = endpoint, tuple([self._unpack(endpoint, packed) for packed in keys.packed]), self._client
            keys.unpacked[self] = unpacked
            return unpacked
        finally:
            self._lock.release()

    def close(self) -> None:
        """Cut it by force. Idempotent; the next use makes a new connection."""
        with self._lock:
            endpoint, self._endpoint = self._endpoint, None
            self._unpacked.clear()
        if endpoint is not None:
            endpoint.close()

    def _connect(self, deadline: float) -> "_ucp.UcpEndpoint":
        endpoint = None if self._asks_first else self._new_endpoint()
        if self._contact is not None and (endpoint is None or _may_use_tcp(endpoint)):
            if endpoint is not None:
                endpoint.close()
                self._asks_first = self._used_tcp = True
            endpoint = self._admitted(self._contact, deadline)
        assert endpoint is not None
        self.emulated = bool(endpoint.transports) and _EMULATING.issuperset(endpoint.transports)
        self.over_tcp = self.emulated and "tcp" in endpoint.transports
        self._told = 0
        return endpoint

    def _admitted(self, contact: Contact, deadline: float) -> "_ucp.UcpEndpoint":
        """A connection that the owner has accepted, and on which it answers.

        UCX identifies the worker of a connection by address and port, while the owner lives. If a worker of another
        process, or an earlier worker of this one, has had the same port, the owner takes the new worker for the old
        one, and tries to connect to it, where nothing listens. So another worker has to try then.
        """
        patience_s = _ANSWERED_S
        while True:
            endpoint = self._let_in(contact, deadline)
            if not self._used_tcp or self._is_answered(endpoint, min(deadline, time.monotonic() + patience_s)):
                return endpoint
            patience_s *= 2  # the owner may only be slow

    def _is_answered(self, endpoint: "_ucp.UcpEndpoint", due: float) -> bool:
        """Whether, until then, the owner answers or UCX reports an error; the endpoint is closed if neither."""
        probe: _ucp.Batch = self._ucp.Batch.atomic(endpoint, False, 0, 0, 0, _NO_WORD, 1)
        while probe.advance(_SPIN_S, due) == self._ucp.RUNNING:
            if time.monotonic() >= due:
                endpoint.close()
                probe.advance(_SPIN_S, due + _ENDED_S)
                return False
            time.sleep(_LOOK_S)
        return True

    def _let_in(self, contact: Contact, deadline: float) -> "_ucp.UcpEndpoint":
        # Two workers number their connections. If one of them has missed any, the owner's worker tries to connect to
        # this process, where nothing listens. So only a worker that was never connected to the owner's can connect to
        # it.
        if self._used_tcp:
            self._client = self._replace_client(self._client)
            self._leave_client()
            self._leave_client = self._client.join(self)
            self._used_tcp = False
        with Admission(contact, self._wire_up_keys(), self._client.sources, deadline) as admission:
            endpoint = self._new_endpoint()
            try:
                if _may_use_tcp(endpoint):
                    self._used_tcp = True
                    admission.connected()
            except BaseException:
                endpoint.close()
                raise
        return endpoint

    def _new_endpoint(self) -> "_ucp.UcpEndpoint":
        endpoint: _ucp.UcpEndpoint = self._ucp.UcpEndpoint(
            self._client.worker, self._worker_address, 1 + secrets.randbits(63)
        )
        return endpoint

    def _unpack(self, endpoint: "_ucp.UcpEndpoint", packed: bytes) -> "_ucp.RemoteKey":
        key = self._unpacked.get(packed)
        if key is None:
            key = self._unpacked[packed] = self._ucp.RemoteKey(endpoint, packed)
            if len(self._unpacked) > _KEYS:
                self._unpacked.popitem(last=False)
        return key


def _may_use_tcp(endpoint: "_ucp.UcpEndpoint") -> bool:
    """Whether bytes may travel over TCP; some versions of UCX do not report their transports."""
    return not endpoint.transports or "tcp" in endpoint.transports


class OwnerConnections:
    """All connections of this process to one owner. Thread-safe.

    Attributes:
        engine: UCX in this process.
        owner: The owner.
        watch: Tells whether the owner lives; None beyond this host.
        worker_address: Of the owner's worker, with its traits.
        abandoned: The connections that were given up.
    """

    def __init__(self, engine: UcxEngine, card: Card) -> None:
        section = UcxCard.of(card)
        self.engine = engine
        self.owner: OwnerId = card.owner
        self.abandoned = AbandonedConnections()
        self.worker_address = section.worker
        self._contact = section.contact
        theirs = Traits.after(section.worker)
        self._obstacle = engine.traits.obstacle(theirs)
        # Within the host the kernel knows at once what UCX may find out only after a long time.
        self.watch = ProcessWatch(card.owner) if card.owner.host == host_id() else None
        self._mismatch = None if self.watch is None else engine.traits.mismatch(theirs)
        self._lock = threading.Lock()
        self._connections: list[UcxConnection] = []
        self._widen(0)
        self._next_client = itertools.count()

    @property
    def asks_first(self) -> bool:
        """Whether the owner must give access before a connection is made, which may take time."""
        return self._contact is not None

    def usable(self) -> bool:
        """Whether the owner is not known to be dead; the next use renews a broken connection."""
        return self.watch is None or not self.watch.gone

    def close(self) -> None:
        """Cut all connections. Idempotent; the next use makes new ones."""
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.close()

    def spread(self, nbytes: int) -> Sequence[int]:
        """The client workers for so many bytes: only the first, or some of the others together."""
        if nbytes < 2 * _CLIENT_BYTES:
            return _FIRST
        if self.watch is None or any(connection.emulated for connection in self._connections):
            return _SECOND  # the owner's one UCX thread is the bottleneck: several sockets only slow it down
        width = self.engine.width
        count = min(width, nbytes // _CLIENT_BYTES)
        if count == width:
            return range(1, width + 1)
        first = next(self._next_client)
        return [1 + (first + i) % width for i in range(count)]

    def connected(self, number: int, keys: RemoteKeys, deadline: float) -> "tuple[UcxConnection, Unpacked]":
        """The connection of a client worker, made if there is no working one, with these keys unpacked for it.

        Raises:
            OwnerDiedError: The owner is gone.
            TransferError: No connection can be made.
            TransferTimeoutError: The deadline (CLOCK_MONOTONIC) passed before the owner had answered.
        """
        if self._mismatch is not None:
            raise TransferError(f"{self.owner} cannot be reached: {self._mismatch}")
        try:
            if number >= len(self._connections):
                self._widen(number)
            connection = self._connections[number]
            unpacked = connection.ready(keys, self._require_owner, deadline)
        except self.engine.ucp.UcxError as error:
            unreachable = error.status == _UNREACHABLE
            raise self.failure(_NOTHING_IN_COMMON if unreachable else str(error), error.status) from error
        if self._obstacle is not None and connection.over_tcp:
            raise TransferError(f"{self.owner} cannot be reached over TCP: {self._obstacle}")
        return connection, unpacked

    def cut(self, endpoint: "_ucp.UcpEndpoint") -> None:
        """Close a connection by force: its operations end, and the owner ignores later data from it."""
        endpoint.close()
        self.abandoned.note(endpoint.number)

    def wait_for_exit(self) -> bool:
        """Whether the owner is gone; waits a moment in case it is dying."""
        return self.watch is not None and self.watch.gone_soon()

    def failure(self, text: str, status: int) -> TransferError:
        """The error for a final failure. Beyond this host, a dead owner looks the same as a cut network."""
        if self.watch is None:
            return OwnerDiedError(f"{self.owner} is gone or cannot be reached: {text}", status=status)
        if self.wait_for_exit():
            return OwnerDiedError(f"{self.owner} is gone", status=status)
        return TransferError(f"the transfer with {self.owner} failed: {text}", status=status)

    def _require_owner(self) -> None:
        if not self.usable():
            raise OwnerDiedError(f"{self.owner} is gone")

    def _widen(self, number: int) -> None:
        with self._lock:
            while len(self._connections) <= number:
                client = self.engine.client(len(self._connections))
                connection = UcxConnection(
                    self.engine.ucp,
                    client,
                    self.worker_address,
                    self._contact,
                    self.engine.wire_up_keys,
                    self.abandoned,
                    functools.partial(self.engine.replace_client, len(self._connections)),
                    far=self.watch is None,
                )
                self._connections.append(connection)
