"""Where transfers are posted: the rails of this process, and its connections to owners.

A *rail* is a port that this process uses, with the completion queue for its requests. The rails of two processes that
talk to each other are paired by number.

A connection to an owner has one *send queue*, of a queue pair, on each rail that both sides have. Requests on a send
queue complete in order, so a completion is for the oldest chain. *Credits* (the attributes `room`) keep queue pairs and
completion queues from overflowing.
"""

import itertools
import logging
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from skipper.dataplane.backends.handshake import TOKEN_BYTES, WireUpKeys, bind
from skipper.dataplane.backends.verbs.chain import RequestChain
from skipper.dataplane.backends.verbs.device import Completions, Device, QueuePair, pyverbs
from skipper.dataplane.backends.verbs.handshake import QueuePairServer, dial
from skipper.dataplane.backends.verbs.memory import MemoryCache, WordRoom
from skipper.dataplane.backends.verbs.port import VerbsPort
from skipper.dataplane.backends.verbs.rdma_cm import ConnectionManager, connect, managed, ticket
from skipper.dataplane.errors import BackendUnavailableError, TransferError
from skipper.dataplane.identity import OwnerId

FLUSHED = 5
"""IBV_WC_WR_FLUSH_ERR: the queue pair failed before it executed this request."""
EXPIRED = -1
"""Not of the device: the deadline of the run passed."""

NO_WAY = frozenset({2, 12})
"""Statuses of the device that are about the path and not the request: own link down, no answer."""
_LOG = logging.getLogger(__name__)


class PostedRun(Protocol):
    """One start of a transfer, for the engine.

    Attributes:
        timeout: Seconds from its submission.
        deadline: On CLOCK_MONOTONIC; None until it is needed.
        attended: Whether a thread is likely to wait for it.
        connection: The connection that it is posted on; None while there is none.
        outstanding: How many of its chains are posted and not complete.
        over: Whether it has ended.
    """

    timeout: float
    deadline: float | None
    attended: bool
    connection: "VerbsConnection | None"
    outstanding: int
    over: bool

    def rails(self) -> Iterable[int]:
        """The rails that this phase has chains for."""

    def next_chain(self, rail: int) -> RequestChain | None:
        """What to post next on a rail in this phase; the same one until `posted`."""

    def posted(self, rail: int) -> None:
        """The next chain on this rail was posted."""

    def all_posted(self) -> bool:
        """Whether this phase has no chain left for any rail."""

    def phase_over(self) -> bool:
        """All chains of the phase are complete; returns whether another one follows. Called with the engine's lock."""

    def finish(self) -> None:
        """Report that it is over. Called without the lock, unless it was over before `VerbsEngine.start` returned."""

    def failed(self, status: int) -> None:
        """Report that its connection is gone, or begin again. Called without the lock, in a thread that may wait."""


class Rail:
    """A port in use, opened.

    Attributes:
        index: Its number in this process, which peers also use.
        device: The opened port.
        manager: Connects peers' queue pairs, if rdma_cm does that.
        completions: The completion queue for requests of this process.
        room: How many more it has room for.
        queues: The send queues in use, by the number of their queue pair.
        starved: Send queues that wait for this room.
    """

    def __init__(self, index: int, port: VerbsPort, options: Mapping[str, Any]) -> None:
        """Open the port.

        Raises:
            BackendUnavailableError: It cannot be opened.
        """
        self.index = index
        self.device = device = Device(port, options)
        try:
            self.completions = Completions(device)
            # Requests of peers complete at the peers.
            self._passive = pyverbs("cq").CQ(device.context, 1)
        except (device.error, OSError) as error:
            raise BackendUnavailableError(f"RDMA device {port} cannot be used: {error}") from error
        self.manager = ConnectionManager(device) if options.get("rdma_cm") else None
        device.manager_port = 0 if self.manager is None else self.manager.port
        self.room = device.completions
        self.queues: dict[int, SendQueue] = {}
        self.starved: list[SendQueue] = []

    def pair(self) -> QueuePair:
        """A queue pair to send from.

        Raises:
            TransferError: The device has none left.
        """
        return QueuePair(self.device, self.completions.queue, depth=self.device.depth)

    def passive_pair(self) -> QueuePair:
        """A queue pair that only serves a peer.

        Raises:
            TransferError: The device has none left.
        """
        return QueuePair(self.device, self._passive, depth=1)


class SendQueue:
    """The send queue of one queue pair of a connection.

    Attributes:
        serial: The id in its completions, since the number of a queue pair is used again for later ones.
        room: How many more requests it holds.
        in_flight: The runs of the posted requests, with the number of these, oldest first.
        waiting: Runs with chains that are not posted.
    """

    __slots__ = ("connection", "in_flight", "pair", "rail", "room", "serial", "waiting")

    def __init__(self, connection: "VerbsConnection", rail: Rail, pair: QueuePair) -> None:
        self.connection = connection
        self.rail = rail
        self.pair = pair
        self.serial = secrets.randbits(63) | 1
        self.room = rail.device.depth
        self.in_flight: deque[tuple[PostedRun, int]] = deque()
        self.waiting: deque[PostedRun] = deque()


class VerbsConnection:
    """A connection to an owner, initiated by this process.

    Attributes:
        queues: Its send queues, by the index of their rail.
        rails: These indices.
        socket: When it closes, each side knows that the other one is gone.
        name: For the connection that replaces it.
        alive: Whether it can be used.
        failed_rail: The rail that had no path to the owner, and made it fail.
        widen_at: When to try the rails that it lacks; None if it has all of them.
    """

    def __init__(self, pairs: Mapping[Rail, QueuePair], tie: socket.socket, name: bytes) -> None:
        """Take over connected queue pairs, one for each rail in use, and the socket of the handshake."""
        self.queues = {rail.index: SendQueue(self, rail, pair) for rail, pair in pairs.items()}
        self.rails = tuple(self.queues)
        self.socket = tie
        self.name = name
        self.alive = True
        self.failed_rail: int | None = None
        self.widen_at: float | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight on it."""
        return not any(queue.in_flight or queue.waiting for queue in self.queues.values())


class SoleRun:
    """Stands for a run of only one chain, while the posting thread checks whether it is over already.

    Most short transfers are, and then need no run. Otherwise a `PostedRun` replaces it.
    """

    __slots__ = ("attended", "connection", "deadline", "outstanding", "over", "run", "timeout")

    def __init__(self) -> None:
        self.timeout = 0.0
        self.deadline: float | None = 0.0
        self.attended = True
        self.connection: VerbsConnection | None = None
        self.outstanding = 1
        self.over = False
        self.run: PostedRun | None = None

    def rails(self) -> Iterable[int]:
        """None, since its chain is posted."""
        return ()

    def next_chain(self, rail: int) -> RequestChain | None:
        """None, since its chain is posted."""

    def posted(self, rail: int) -> None:
        """Never called."""

    def all_posted(self) -> bool:
        """True, since its chain is posted."""
        return True

    def phase_over(self) -> bool:
        """False: it has only one phase."""
        return False

    def finish(self) -> None:
        """Do nothing: nobody waits for it."""

    def failed(self, status: int) -> None:
        """See `PostedRun`."""
        if self.run is not None:
            self.run.failed(status)


def deadline_of(run: PostedRun) -> float:
    """Its deadline; infinity while it needs none."""
    return float("inf") if run.deadline is None else run.deadline


def set_deadline(run: PostedRun) -> None:
    """Set its deadline when it is first needed: some clocks cost more than the short transfers that need none."""
    if run.deadline is None:
        run.deadline = time.monotonic() + run.timeout


def tell_failed(runs: Iterable[PostedRun], status: int, culprit: PostedRun | None) -> None:
    """Tell runs that their connection is gone: the culprit gets the reason, the others that they were flushed.

    No run waits beyond its own deadline, and in this order none delays another.
    """
    for run in sorted(runs, key=deadline_of):
        run.failed(status if run is culprit else FLUSHED)


class QueuePairs:
    """One end of a connection: its queue pairs, by rail."""

    def __init__(self) -> None:
        self.by_rail: dict[int, QueuePair] = {}

    @property
    def endpoints(self) -> dict[int, bytes]:
        """The data that the other end needs to connect, by rail."""
        return {rail: pair.endpoint for rail, pair in self.by_rail.items()}

    def keep(self, rails: Iterable[int]) -> None:
        """Destroy the queue pairs on all other rails."""
        for rail in self.by_rail.keys() - set(rails):
            self.by_rail.pop(rail).close()

    def close(self) -> None:
        """Destroy them: after that no data move, and nothing completes. Idempotent."""
        for pair in self.by_rail.values():
            pair.close()


class OwnerQueuePairs(QueuePairs):
    """The owner's end of a connection."""

    def __init__(self, rails: Sequence[Rail], key: bytes) -> None:
        super().__init__()
        self._rails = rails
        self._key = key

    def connect(self, theirs: Mapping[int, bytes]) -> None:
        """Become ready for the other end, or let it connect through the connection manager.

        Raises:
            TransferError: A device refuses the other end's data.
        """
        for rail, endpoint in theirs.items():
            pair, manager = self.by_rail[rail], self._rails[rail].manager
            if manager is None:
                pair.connect(endpoint)
            else:
                manager.expect(ticket(self._key, endpoint, pair.endpoint), pair)

    def close(self) -> None:
        """See `QueuePairs`."""
        for rail, pair in self.by_rail.items():
            manager = self._rails[rail].manager
            if manager is not None:
                manager.forget(pair)
        super().close()


class Rails:
    """The rails of a process. Thread-safe.

    Attributes:
        rails: The ports in use.
        devices: The opened devices, by rail.
        memory: Registered with them.
        words: Room for epoch words, registered with them.
        turns: Counts the programs, for small ones, which use one of several rails.
        token: What peers need from a handle to connect, besides a common secret.
        address: Where they connect.
        staging: Why GPU memory is staged through host memory; None while it is not.
    """

    def __init__(
        self, ports: Sequence[VerbsPort], options: Mapping[str, Any], owner: OwnerId, wire_up_keys: WireUpKeys
    ) -> None:
        """Open the ports and listen for peers.

        Raises:
            BackendUnavailableError: A port cannot be opened, or the address to listen on is taken.
        """
        self.rails = tuple(Rail(index, port, options) for index, port in enumerate(ports))
        self.devices = tuple(rail.device for rail in self.rails)
        self.memory = MemoryCache(self.devices)
        self.words = WordRoom(self.devices)
        self.turns = itertools.count()
        self.staging: str | None = None
        self.token = secrets.token_bytes(TOKEN_BYTES)
        listener, self.address = bind(options.get("listen"), f"skipper-verbs-{owner.token:016x}")
        self._wire_up_keys = wire_up_keys
        self._server = QueuePairServer(
            listener, self.address, self.token, wire_up_keys, range(len(self.rails)), self._passive_pairs
        )

    def connect(
        self, address: str, token: bytes, wanted: Sequence[int], deadline: float, *, replaces: bytes
    ) -> VerbsConnection:
        """Connect to an owner over the wanted rails that it also has; see `handshake.dial`.

        Raises:
            OwnerDiedError: No process listens there any more.
            TransferError: The connection cannot be made.
            TransferTimeoutError: The deadline passed.
        """
        pairs = QueuePairs()
        try:
            self._fill(pairs, wanted, Rail.pair)
            dialled = dial(address, token, self._wire_up_keys(), pairs.endpoints, deadline, replaces=replaces)
            try:
                pairs.keep(dialled.endpoints)
                for rail, theirs in dialled.endpoints.items():
                    self._connect(self.rails[rail], pairs.by_rail[rail], theirs, dialled.key, deadline)
            except TransferError:
                dialled.socket.close()
                raise
        except BaseException:
            pairs.close()
            raise
        used = {self.rails[rail]: pairs.by_rail[rail] for rail in dialled.endpoints}
        return VerbsConnection(used, dialled.socket, dialled.name)

    def stage(self, why: str) -> None:
        """Note, and log once, that GPU memory of this process is staged through host memory."""
        if self.staging is None:
            self.staging = why
            _LOG.warning("CUDA memory is moved through host memory, which is slower: %s", why)

    def stop_listening(self) -> None:
        """Close the connections of all peers. Idempotent."""
        self._server.close()

    def close(self) -> None:
        """Close the devices and everything made from them. Idempotent."""
        for device in self.devices:
            device.close()

    def _passive_pairs(self, rails: Iterable[int], key: bytes) -> OwnerQueuePairs:
        pairs = OwnerQueuePairs(self.rails, key)
        try:
            self._fill(pairs, rails, Rail.passive_pair)
        except TransferError:
            pairs.close()
            raise
        return pairs

    def _fill(self, pairs: QueuePairs, rails: Iterable[int], make: Callable[[Rail], QueuePair]) -> None:
        for rail in rails:
            pairs.by_rail[rail] = make(self.rails[rail])

    def _connect(self, rail: Rail, pair: QueuePair, theirs: bytes, key: bytes, deadline: float) -> None:
        """Connect directly, or through the connection manager if the owner wants that."""
        if managed(theirs):
            connect(pair, rail.device, theirs, ticket(key, pair.endpoint, theirs), deadline)
        else:
            pair.connect(theirs)
