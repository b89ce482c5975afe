"""The owner's side of the conversation that connects queue pairs; see `exchange` for what is said."""

import secrets
import socket
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from skipper.dataplane.backends.exchange import (
    GREETING_S,
    PROOFS_BYTES,
    WireUpKeys,
    is_kindred,
    proof_keys,
    prove,
    proved_by,
)
from skipper.dataplane.backends.exchange_server import ExchangeServer
from skipper.dataplane.backends.verbs.device import ENDPOINT
from skipper.dataplane.backends.verbs.exchange import HELLO, MAGIC, NOBODY, Endpoints, bits_of, by_rail


class OwnerEnd(Protocol):
    """The owner's end of a connection; see `rails.OwnerQueuePairs`."""

    @property
    def endpoints(self) -> Endpoints:
        """Its own."""

    def connect(self, theirs: Endpoints) -> None:
        """Connect to the initiator's, or expect it."""

    def close(self) -> None:
        """Destroy it."""


@dataclass(slots=True)
class _Visitor:
    """A connection as the owner sees it; `wanted` bytes make the message that it owes, `name` is the one it has."""

    connection: socket.socket
    origin: Hashable
    due: float
    proved: bool = False
    wanted: int = HELLO.size
    received: bytearray = field(default_factory=bytearray)
    greetings: bytes = b""
    name: bytes = NOBODY
    rails: tuple[int, ...] = ()
    pairs: OwnerEnd | None = None


class QueuePairServer(ExchangeServer[_Visitor]):
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
            listener: Of `exchange.bind`; kept.
            address: The same as text, as it stands in handles.
            token: Of the handles.
            wire_up_keys: Of which a visitor must have one.
            rails: Of this owner.
            make_pairs: Makes this end of a connection on such rails, given the key of its proofs.
        """
        super().__init__(listener, "dataplane-verbs-server")
        self._address = address
        self._token = token
        self._wire_up_keys = wire_up_keys
        self._rails = tuple(rails)
        self._make_pairs = make_pairs
        self._named: dict[bytes, _Visitor] = {}  # those that have proved themselves
        self._begin()

    def _visitor(self, connection: socket.socket, origin: Hashable, due: float) -> _Visitor:
        return _Visitor(connection, origin, due)

    def _is_silent(self, visitor: _Visitor) -> bool:
        return visitor.pairs is not None

    def _stays(self, visitor: _Visitor, now: float) -> bool:
        return visitor.pairs is not None or now <= visitor.due

    def _patience(self) -> float | None:
        return GREETING_S if any(visitor.pairs is None for visitor in self._visitors.values()) else None

    def _understand(self, visitor: _Visitor, message: bytes) -> bool:
        return self._meet(visitor, message) if visitor.greetings else self._greet(visitor, message)

    def _greet(self, visitor: _Visitor, theirs: bytes) -> bool:
        magic, bits, visitor.name = HELLO.unpack(theirs)
        visitor.rails = tuple(rail for rail in self._rails if bits >> rail & 1)
        if not is_kindred(magic, MAGIC):
            return False
        mine = HELLO.pack(MAGIC, bits_of(self._rails), secrets.token_bytes(16))
        visitor.greetings = theirs + mine
        visitor.wanted = len(visitor.rails) * ENDPOINT.size + len(NOBODY) + PROOFS_BYTES
        visitor.connection.sendall(mine)
        return magic == MAGIC and bool(visitor.rails)

    def _meet(self, visitor: _Visitor, message: bytes) -> bool:
        theirs, proofs = message[:-PROOFS_BYTES], message[-PROOFS_BYTES:]
        said = visitor.greetings + theirs
        keys = proof_keys(self._wire_up_keys(), self._token, self._address)
        key = proved_by(proofs, keys, b"initiator", said)
        if key is None:
            return False
        self._has_proved(visitor)
        replaced = self._named.get(theirs[-len(NOBODY) :])
        if replaced is not None:
            self._see_off(replaced)
        visitor.wanted = 1
        self._named[visitor.name] = visitor
        visitor.pairs = pairs = self._make_pairs(visitor.rails, key)
        pairs.connect(by_rail(theirs, visitor.rails))
        mine = b"".join(pairs.endpoints[rail] for rail in visitor.rails)
        visitor.connection.sendall(mine + prove(key, b"owner", said, mine))
        return True

    def _part(self, visitor: _Visitor) -> None:
        self._named.pop(visitor.name, None)
        visitor.connection.close()
        if visitor.pairs is not None:
            visitor.pairs.close()
