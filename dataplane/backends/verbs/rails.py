"""The RDMA side of a process: its rails, the memory registered with them, and the door where peers knock.

A *rail* is a port that this process uses, with the queue that its requests complete on. Rails of two processes that
talk to each other are paired by their number.
"""

import itertools
import logging
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skipper.dataplane.backends.exchange import TOKEN_BYTES, WireUpKeys, bind
from skipper.dataplane.backends.verbs.completions import Completions
from skipper.dataplane.backends.verbs.device import Device, QueuePair, pyverbs
from skipper.dataplane.backends.verbs.exchange import dial
from skipper.dataplane.backends.verbs.link import Lane
from skipper.dataplane.backends.verbs.memory import MemoryCache, WordRoom
from skipper.dataplane.backends.verbs.port import Port
from skipper.dataplane.backends.verbs.rdma_cm import Manager, connect, managed, ticket
from skipper.dataplane.backends.verbs.server import Server
from skipper.dataplane.errors import BackendUnavailableError, TransferError
from skipper.dataplane.identity import OwnerId

_LOG = logging.getLogger(__name__)


class Rail:
    """A port in use.

    Attributes:
        index: Its place among those of this process; peers know it by that too.
        device: The opened port.
        manager: Connects peers' queue pairs, where that is left to rdma_cm.
        completions: Where requests of this process complete.
        room: How many more can.
        lanes: The queue pairs in use, by their number.
        starved: Lanes that wait for that room.
    """

    def __init__(self, index: int, port: Port, options: Mapping[str, Any]) -> None:
        """Open the port.

        Raises:
            BackendUnavailableError: It cannot be opened.
        """
        self.index = index
        self.device = device = Device(port, options)
        try:
            self.completions = Completions(device)
            # Peers' requests complete at the peers.
            self._passive = pyverbs("cq").CQ(device.context, 1)
        except (device.error, OSError) as error:
            raise BackendUnavailableError(f"RDMA device {port} cannot be used: {error}") from error
        self.manager = Manager(device) if options.get("rdma_cm") else None
        device.manager_port = 0 if self.manager is None else self.manager.port
        self.room = device.completions
        self.lanes: dict[int, Lane] = {}
        self.starved: list[Lane] = []

    def pair(self) -> QueuePair:
        """A queue pair to send from.

        Raises:
            TransferError: The device has none left.
        """
        return self.device.queue_pair(self.completions.queue, depth=self.device.depth)

    def passive_pair(self) -> QueuePair:
        """A queue pair that only serves a peer.

        Raises:
            TransferError: The device has none left.
        """
        return self.device.queue_pair(self._passive, depth=1)


class Pairs:
    """One end of a link: its queue pairs, by rail."""

    def __init__(self) -> None:
        self.by_rail: dict[int, QueuePair] = {}

    @property
    def endpoints(self) -> dict[int, bytes]:
        """What the other end needs to connect, by rail."""
        return {rail: pair.endpoint for rail, pair in self.by_rail.items()}

    def keep(self, rails: Iterable[int]) -> None:
        """Destroy those on all other rails."""
        for rail in self.by_rail.keys() - set(rails):
            self.by_rail.pop(rail).close()

    def close(self) -> None:
        """Destroy them: nothing moves any more, and nothing completes. Idempotent."""
        for pair in self.by_rail.values():
            pair.close()


class PassivePairs(Pairs):
    """The owner's end of a link."""

    def __init__(self, rails: Sequence[Rail], key: bytes) -> None:
        super().__init__()
        self._rails = rails
        self._key = key

    def connect(self, theirs: Mapping[int, bytes]) -> None:
        """Become ready to be reached by the other end, or let it come by the connection manager.

        Raises:
            TransferError: A device refuses what the other end said of itself.
        """
        for rail, endpoint in theirs.items():
            pair, manager = self.by_rail[rail], self._rails[rail].manager
            if manager is None:
                pair.connect(endpoint)
            else:
                manager.expect(ticket(self._key, endpoint, pair.endpoint), pair)

    def close(self) -> None:
        """See `Pairs`."""
        for rail, pair in self.by_rail.items():
            manager = self._rails[rail].manager
            if manager is not None:
                manager.forget(pair)
        super().close()


@dataclass(frozen=True, slots=True)
class Connection:
    """One that this process initiated: a queue pair on each rail, the socket that tells the owner's end, its name."""

    pairs: tuple[tuple[Rail, QueuePair], ...]
    socket: socket.socket
    name: bytes


class Rails:
    """The rails of a process. Thread-safe.

    Attributes:
        rails: They.
        devices: Theirs.
        memory: Registered with them.
        words: Room for epoch words, registered with them.
        turns: Counts the programs, for those that use one rail of several.
        token: What peers must have from a handle to connect, beside a secret in common.
        address: Where they do.
        staging: Why GPU memory is moved by way of host memory; None while it is not.
    """

    def __init__(
        self, ports: Sequence[Port], options: Mapping[str, Any], owner: OwnerId, wire_up_keys: WireUpKeys
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
        self._server = Server(
            listener, self.address, self.token, wire_up_keys, range(len(self.rails)), self._passive_pairs
        )

    def connect(
        self, address: str, token: bytes, wanted: Sequence[int], deadline: float, *, replaces: bytes
    ) -> Connection:
        """Connect to an owner over those of the wanted rails that it has too; see `verbs_exchange.dial`.

        Raises:
            OwnerDiedError: Nobody listens there any more.
            TransferError: It cannot be done.
            TransferTimeoutError: The deadline passed.
        """
        pairs = Pairs()
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
        used = tuple((self.rails[rail], pairs.by_rail[rail]) for rail in dialled.endpoints)
        return Connection(used, dialled.socket, dialled.name)

    def stage(self, why: str) -> None:
        """Note, and say once in the log, that GPU memory of this process is moved by way of host memory."""
        if self.staging is None:
            self.staging = why
            _LOG.warning("CUDA memory is moved by way of host memory, which is slower: %s", why)

    def stop_listening(self) -> None:
        """Hang up on all peers. Idempotent."""
        self._server.close()

    def close(self) -> None:
        """Close the devices with everything that was made from them. Idempotent."""
        for device in self.devices:
            device.close()

    def _passive_pairs(self, rails: Iterable[int], key: bytes) -> PassivePairs:
        pairs = PassivePairs(self.rails, key)
        try:
            self._fill(pairs, rails, Rail.passive_pair)
        except TransferError:
            pairs.close()
            raise
        return pairs

    def _fill(self, pairs: Pairs, rails: Iterable[int], make: Callable[[Rail], QueuePair]) -> None:
        for rail in rails:
            pairs.by_rail[rail] = make(self.rails[rail])

    def _connect(self, rail: Rail, pair: QueuePair, theirs: bytes, key: bytes, deadline: float) -> None:
        """By hand, or, where the owner wants it, by the connection manager."""
        if managed(theirs):
            connect(pair, rail.device, theirs, ticket(key, pair.endpoint, theirs), deadline)
        else:
            pair.connect(theirs)
