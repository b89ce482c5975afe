"""The owner's side of the conversation that lets others connect to UCX's TCP port; see `ucx_admission`."""

import contextlib
import ipaddress
import secrets
import socket
import struct
import time
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from skipper.dataplane.backends import exchange, own_sockets, socket_filter
from skipper.dataplane.backends.exchange import (
    DIGEST_BYTES,
    GREETING_S,
    PROOFS_BYTES,
    WireUpKeys,
    is_kindred,
    proof_keys,
    prove,
    proved_by,
)
from skipper.dataplane.backends.exchange_server import ExchangeServer
from skipper.dataplane.backends.own_sockets import Place
from skipper.dataplane.backends.ucx.admission import FOUND, HELLO, MAGIC, PLACES, Contact, pack_places, parse_places

_PROVED_S = 20.0  # for the rest of the conversation, once a visitor has proved itself
_LOOK_S = 0.001  # between two looks at whether UCX has accepted a connection


class _Stage(Enum):
    """Which message is due of an initiator."""

    HELLO = auto()
    SOURCES = auto()
    CONNECTIONS = auto()
    NONE = auto()


# Its role, what it says, how long its proofs are.
_OWED: dict[_Stage, tuple[bytes, struct.Struct, int]] = {
    _Stage.SOURCES: (b"sources", PLACES, PROOFS_BYTES),
    _Stage.CONNECTIONS: (b"connections", PLACES, DIGEST_BYTES),
}


@dataclass(slots=True, eq=False)
class _Visitor:
    """An initiator, with what it has said so far."""

    connection: socket.socket
    origin: Hashable
    due: float
    proved: bool = False
    stage: _Stage = _Stage.HELLO
    received: bytearray = field(default_factory=bytearray)
    transcript: bytes = b""
    keys: tuple[bytes, ...] = ()  # that its proofs may be made with; one, once it has proved itself
    sources: frozenset[ipaddress.IPv6Address] = frozenset()
    expected: set[Place] = field(default_factory=set)
    claimed: int = 0

    @property
    def wanted(self) -> int:
        """How many bytes the message has that is due; 1 where there is none."""
        if self.stage is _Stage.HELLO:
            return HELLO.size
        if self.stage is _Stage.NONE:
            return 1
        _, layout, proof_nbytes = _OWED[self.stage]
        return layout.size + proof_nbytes


class Server(ExchangeServer[_Visitor]):
    """Lets others connect to UCX. Until somebody has proved itself nobody can."""

    def __init__(
        self, listeners: Sequence[socket.socket], address: str, wire_up_keys: WireUpKeys, *, within_host: bool
    ) -> None:
        """Close UCX's listening sockets to everybody, and listen for those who ask to be let in.

        Args:
            listeners: Copies of UCX's sockets, kept; closed already by `socket_filter.admit`.
            address: The IP at which to listen.
            wire_up_keys: Of which a visitor must have one.
            within_host: For `Contact`.

        Raises:
            BackendUnavailableError: It cannot be listened at.
        """
        own = f"[{address}]:0" if ":" in address else f"{address}:0"
        door, where = exchange.bind(own, "")
        self._listeners = tuple(listeners)
        super().__init__(door, "dataplane-ucx-admission", self._listeners)
        self._places = {Place.of(listener.getsockname()) for listener in listeners}
        self.contact = Contact(secrets.token_bytes(exchange.TOKEN_BYTES), where, within_host)
        self._wire_up_keys = wire_up_keys
        self._admitted: frozenset[ipaddress.IPv6Address] = frozenset()
        self._elsewhere: dict[int, str] = {}  # descriptors that are not UCX's connections
        self._begin()

    def _visitor(self, connection: socket.socket, origin: Hashable, due: float) -> _Visitor:
        return _Visitor(connection, origin, due)

    def _is_silent(self, visitor: _Visitor) -> bool:
        return visitor.stage is _Stage.NONE

    def _stays(self, visitor: _Visitor, now: float) -> bool:
        return (visitor.stage is not _Stage.NONE or self._looked_for(visitor)) and now <= visitor.due

    def _patience(self) -> float | None:
        if any(visitor.stage is _Stage.NONE for visitor in self._visitors.values()):
            return _LOOK_S
        return GREETING_S if self._visitors else None

    def _understand(self, visitor: _Visitor, message: bytes) -> bool:
        if visitor.stage is _Stage.HELLO:
            return self._greet(visitor, message)
        role, layout, _ = _OWED[visitor.stage]
        said, proofs = message[: layout.size], message[layout.size :]
        visitor.transcript += said
        key = proved_by(proofs, visitor.keys, role, visitor.transcript)
        if key is None:
            return False
        visitor.keys = (key,)
        places = parse_places(said)
        if visitor.stage is _Stage.SOURCES:
            self._has_proved(visitor)
            visitor.due = time.monotonic() + _PROVED_S
            visitor.sources = frozenset(place.address for place in places)
            self._restrict()
            visitor.stage = _Stage.CONNECTIONS
            self._answer(visitor, b"listeners", pack_places(sorted(self._places)))
        else:
            visitor.expected = {place for place in places if place.address in visitor.sources}
            visitor.claimed = len(visitor.expected)
            visitor.stage = _Stage.NONE
        return True

    def _greet(self, visitor: _Visitor, theirs: bytes) -> bool:
        magic, _ = HELLO.unpack(theirs)
        if not is_kindred(magic, MAGIC):
            return False
        mine = HELLO.pack(MAGIC, secrets.token_bytes(16))
        visitor.transcript = theirs + mine
        visitor.keys = proof_keys(self._wire_up_keys(), self.contact.token, self.contact.address)
        visitor.stage = _Stage.SOURCES
        visitor.connection.sendall(mine)
        return bool(magic == MAGIC)

    def _looked_for(self, visitor: _Visitor) -> bool:
        """Lift the restriction on what a visitor has claimed; whether some of it has not been accepted yet."""
        if visitor.expected:
            for place, connection in self._accepted():
                with connection:
                    if place in visitor.expected:
                        socket_filter.lift(connection)
                        visitor.expected.discard(place)
            if visitor.expected:
                return True
        self._close_to(visitor)
        with contextlib.suppress(OSError):  # it has left
            self._answer(visitor, b"found", FOUND.pack(visitor.claimed))
        return False

    def _answer(self, visitor: _Visitor, role: bytes, message: bytes) -> None:
        visitor.transcript += message
        visitor.connection.sendall(message + prove(visitor.keys[0], role, visitor.transcript))

    def _part(self, visitor: _Visitor) -> None:
        """Close the port to it, end what it has not claimed."""
        self._close_to(visitor)
        visitor.connection.close()

    def _close_to(self, visitor: _Visitor) -> None:
        """Let nobody connect for its sake any more, and end what it has not claimed. Idempotent."""
        if visitor.sources:
            visitor.sources = frozenset()
            self._restrict()
            self._sweep(self._admitted)

    def _restrict(self) -> None:
        """Let those connect whom a visitor speaks for, and nobody else."""
        wanted = frozenset().union(*(visitor.sources for visitor in self._visitors.values()))
        if wanted != self._admitted:
            for listener in self._listeners:
                socket_filter.admit(listener, wanted)
            self._admitted = wanted

    def _sweep(self, spared: Collection[ipaddress.IPv6Address]) -> None:
        """End the connections that nobody has claimed."""
        for place, connection in self._accepted():
            with connection:
                if place.address not in spared and socket_filter.restricted(connection):
                    own_sockets.shut(connection)

    def _accepted(self) -> list[tuple[Place, socket.socket]]:
        """The connections that UCX has accepted, by their other ends; copies, to be closed."""
        found = []
        now = own_sockets.descriptors()
        new = {fd: name for fd, name in now.items() if self._elsewhere.get(fd) != name}
        self._elsewhere = {fd: name for fd, name in now.items() if fd not in new}
        for fd, name in new.items():
            copy = own_sockets.copy_of(fd)
            if copy is None:
                continue
            both = own_sockets.ends(copy)
            if both is not None and both[0] in self._places:
                found.append((both[1], copy))
            else:
                copy.close()
                if both is not None:
                    self._elsewhere[fd] = name
        return found
