"""The owner's side of the handshake that connects queue pairs; see `handshake` for what is said."""

import secrets
import socket
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Protocol

from skipper.dataplane.backends.handshake import PROOFS_BYTES, WireUpKeys
from skipper.dataplane.backends.handshake_server import GREETING_S, HandshakeServer, Initiator
from skipper.dataplane.backends.verbs.device import ENDPOINT
from skipper.dataplane.backends.verbs.handshake import HELLO, MAGIC, NOBODY, Endpoints, bits_of, by_rail


class OwnerEnd(Protocol):
    """The owner's end of a connection; see `rails.OwnerQueuePairs`."""

    @property
    def endpoints(self) -> Endpoints:
        """Its own."""

    def connect(self, theirs: Endpoints) -> None:
        """Connect to the initiator's, or expect it."""

    def close(self) -> None:
        """Destroy it."""


@dataclass(slots=True, eq=False)
class VerbsInitiator(Initiator):
    """An initiator of queue pairs.

    Attributes:
        name: Of its connection.
        rails: Those that both sides have.
        pairs: The owner's end; None until it has proved itself.
    """

    name: bytes = NOBODY
    rails: tuple[int, ...] = ()
    pairs: OwnerEnd | None = None


class QueuePairServer(HandshakeServer[VerbsInitiator]):
    """The owner's side: answers initiators, and keeps their queue pairs while they live."""

    def __init__(
        self,
        listener: socket.socket,
        address: str,
        token: bytes,
        wire_up_keys: WireUpKeys,
        rails: Iterable[int],
        make_pairs: Callable[[tuple[int, ...], bytes], OwnerEnd],
    ) -> None:
        """Begin to listen.

        Args:
            listener: Of `handshake.bind`; kept.
            address: The same as text, as it stands in handles.
            token: Of the handles.
            wire_up_keys: One of which an initiator must have.
            rails: Of this owner.
            make_pairs: Makes this end of a connection on such rails, given the key of its proofs.
        """
        super().__init__(listener, "dataplane-verbs-server", address=address, token=token, wire_up_keys=wire_up_keys)
        self._rails = tuple(rails)
        self._make_pairs = make_pairs
        self._named: dict[bytes, VerbsInitiator] = {}  # those that have proved themselves
        self._begin()

    def _initiator(self, connection: socket.socket, origin: Hashable, due: float) -> VerbsInitiator:
        return VerbsInitiator(connection, origin, due, HELLO.size)

    def _stays(self, initiator: VerbsInitiator, now: float) -> bool:
        return initiator.silent or now <= initiator.due

    def _patience(self) -> float | None:
        return GREETING_S if any(not initiator.silent for initiator in self._initiators.values()) else None

    def _understand(self, initiator: VerbsInitiator, message: bytes) -> bool:
        if initiator.transcript:
            return self._connect(initiator, message)
        _, bits, initiator.name = HELLO.unpack(message)
        initiator.rails = tuple(rail for rail in self._rails if bits >> rail & 1)
        initiator.wanted = len(initiator.rails) * ENDPOINT.size + len(NOBODY) + PROOFS_BYTES
        mine = HELLO.pack(MAGIC, bits_of(self._rails), secrets.token_bytes(16))
        return self._greet(initiator, message, mine, MAGIC) and bool(initiator.rails)

    def _connect(self, initiator: VerbsInitiator, message: bytes) -> bool:
        theirs, proofs = message[:-PROOFS_BYTES], message[-PROOFS_BYTES:]
        if not self._proves(initiator, b"initiator", theirs, proofs):
            return False
        replaced = self._named.get(theirs[-len(NOBODY) :])
        if replaced is not None:
            self._hang_up(replaced)
        initiator.wanted = 1
        self._named[initiator.name] = initiator
        initiator.pairs = pairs = self._make_pairs(initiator.rails, initiator.keys[0])
        initiator.silent = True
        pairs.connect(by_rail(theirs, initiator.rails))
        self._answer(initiator, b"owner", b"".join(pairs.endpoints[rail] for rail in initiator.rails))
        return True

    def _part(self, initiator: VerbsInitiator) -> None:
        if self._named.get(initiator.name) is initiator:  # anybody can send a name before it is proved
            del self._named[initiator.name]
        initiator.connection.close()
        if initiator.pairs is not None:
            initiator.pairs.close()
