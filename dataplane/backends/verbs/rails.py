"""The RDMA side of a process: its rails, the memory registered with them, and the server that peers connect to."""

import itertools
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from skipper.dataplane.backends.handshake import TOKEN_BYTES, WireUpKeys, bind
from skipper.dataplane.backends.verbs.connection import Rail, VerbsConnection
from skipper.dataplane.backends.verbs.device import QueuePair
from skipper.dataplane.backends.verbs.handshake import dial
from skipper.dataplane.backends.verbs.handshake_server import QueuePairServer
from skipper.dataplane.backends.verbs.memory import MemoryCache, WordRoom
from skipper.dataplane.backends.verbs.port import VerbsPort
from skipper.dataplane.backends.verbs.rdma_cm import connect, managed, ticket
from skipper.dataplane.errors import TransferError
from skipper.dataplane.identity import OwnerId

_LOG = logging.getLogger(__name__)


class QueuePairs:
    """One end of a connection: its queue pairs, by rail."""

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


class OwnerQueuePairs(QueuePairs):
    """The owner's end of a connection."""

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


class Rails:
    """The rails of a process. Thread-safe.

    Attributes:
        rails: The ports in use.
        devices: The opened devices, by rail.
        memory: Registered with them.
        words: Room for epoch words, registered with them.
        turns: Counts the programs, for those that use one rail of several.
        token: What peers must have from a handle to connect, beside a secret in common.
        address: Where they do.
        staging: Why GPU memory is moved by way of host memory; None while it is not.
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
        """Connect to an owner over those of the wanted rails that it has too; see `handshake.dial`.

        Raises:
            OwnerDiedError: Nobody listens there any more.
            TransferError: It cannot be done.
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
        """Connect by hand, or by the connection manager if the owner wants that."""
        if managed(theirs):
            connect(pair, rail.device, theirs, ticket(key, pair.endpoint, theirs), deadline)
        else:
            pair.connect(theirs)
