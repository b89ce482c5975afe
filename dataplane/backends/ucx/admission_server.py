"""The owner's side of the handshake that lets others connect to UCX's TCP port; see `admission`."""

import contextlib
import ipaddress
import secrets
import socket
import time
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field

from skipper.dataplane.backends import own_sockets, socket_filter
from skipper.dataplane.backends.handshake import DIGEST_BYTES, PROOFS_BYTES, TOKEN_BYTES, WireUpKeys, bind
from skipper.dataplane.backends.handshake_server import GREETING_S, HandshakeServer, Initiator
from skipper.dataplane.backends.own_sockets import SocketPlace
from skipper.dataplane.backends.ucx.admission import FOUND, HELLO, MAGIC, PLACES, Contact, pack_places, parse_places

_PROVED_S = 20.0  # for the rest of the handshake, once an initiator has proved itself
_LOOK_S = 0.001  # between two looks at whether UCX has accepted a connection


# How many bytes an initiator's messages have, the greeting apart.
_SOURCES_BYTES = PLACES.size + PROOFS_BYTES
_CONNECTIONS_BYTES = PLACES.size + DIGEST_BYTES


@dataclass(slots=True, eq=False)
class AdmissionInitiator(Initiator):
    """An initiator that asks to be let in.

    Attributes:
        sources: The addresses from which it may connect now.
        expected: Its ends of the connections that it has claimed and UCX has not accepted yet.
        claimed: How many it has claimed.
    """

    sources: frozenset[ipaddress.IPv6Address] = frozenset()
    expected: set[SocketPlace] = field(default_factory=set)
    claimed: int = 0


class AdmissionServer(HandshakeServer[AdmissionInitiator]):
    """Lets others connect to UCX. Nobody can before somebody has proved itself."""

    def __init__(
        self, listeners: Sequence[socket.socket], address: str, wire_up_keys: WireUpKeys, *, within_host: bool
    ) -> None:
        """Close UCX's listening sockets to everybody, and listen for those who ask to be let in.

        Args:
            listeners: Copies of UCX's sockets, kept; closed already by `socket_filter.admit`.
            address: The IP at which to listen.
            wire_up_keys: One of which an initiator must have.
            within_host: For `Contact`.

        Raises:
            BackendUnavailableError: It cannot be listened at.
        """
        own = f"[{address}]:0" if ":" in address else f"{address}:0"
        listener, where = bind(own, "")
        token = secrets.token_bytes(TOKEN_BYTES)
        self._ucx_listeners = tuple(listeners)
        super().__init__(
            listener,
            "dataplane-ucx-admission",
            address=where,
            token=token,
            wire_up_keys=wire_up_keys,
            others=self._ucx_listeners,
        )
        self._places = {SocketPlace.of(each.getsockname()) for each in listeners}
        self.contact = Contact(token, where, within_host)
        self._admitted: frozenset[ipaddress.IPv6Address] = frozenset()
        self._elsewhere: dict[int, str] = {}  # descriptors that are not UCX's connections
        self._begin()

    def _initiator(self, connection: socket.socket, origin: Hashable, due: float) -> AdmissionInitiator:
        return AdmissionInitiator(connection, origin, due, HELLO.size)

    def _stays(self, initiator: AdmissionInitiator, now: float) -> bool:
        return (not initiator.silent or self._looked_for(initiator)) and now <= initiator.due

    def _patience(self) -> float | None:
        if any(initiator.silent for initiator in self._initiators.values()):
            return _LOOK_S
        return GREETING_S if self._initiators else None

    def _understand(self, initiator: AdmissionInitiator, message: bytes) -> bool:
        if not initiator.transcript:
            initiator.wanted = _SOURCES_BYTES
            return self._greet(initiator, message, HELLO.pack(MAGIC, secrets.token_bytes(16)), MAGIC)
        role = b"connections" if initiator.proved else b"sources"
        said, proofs = message[: PLACES.size], message[PLACES.size :]
        if not self._proves(initiator, role, said, proofs):
            return False
        places = parse_places(said)
        if role == b"sources":
            initiator.due = time.monotonic() + _PROVED_S
            initiator.sources = frozenset(place.address for place in places)
            self._restrict()
            initiator.wanted = _CONNECTIONS_BYTES
            self._answer(initiator, b"listeners", pack_places(sorted(self._places)))
        else:
            initiator.expected = {place for place in places if place.address in initiator.sources}
            initiator.claimed = len(initiator.expected)
            initiator.silent = True
            initiator.wanted = 1
        return True

    def _looked_for(self, initiator: AdmissionInitiator) -> bool:
        """Lift the restriction on what an initiator has claimed; whether some of it has not been accepted yet."""
        if initiator.expected:
            for place, connection in self._accepted():
                with connection:
                    if place in initiator.expected:
                        socket_filter.lift(connection)
                        initiator.expected.discard(place)
            if initiator.expected:
                return True
        self._close_to(initiator)
        with contextlib.suppress(OSError):  # it has left
            self._answer(initiator, b"found", FOUND.pack(initiator.claimed))
        return False

    def _part(self, initiator: AdmissionInitiator) -> None:
        """Close the port to it, end what it has not claimed."""
        self._close_to(initiator)
        initiator.connection.close()

    def _close_to(self, initiator: AdmissionInitiator) -> None:
        """Let nobody connect from its addresses any more, and end what it has not claimed. Idempotent."""
        if initiator.sources:
            initiator.sources = frozenset()
            self._restrict()
            self._sweep(self._admitted)

    def _restrict(self) -> None:
        """Let those addresses connect that an initiator has named, and no others."""
        wanted = frozenset().union(*(initiator.sources for initiator in self._initiators.values()))
        if wanted != self._admitted:
            for listener in self._ucx_listeners:
                socket_filter.admit(listener, wanted)
            self._admitted = wanted

    def _sweep(self, spared: Collection[ipaddress.IPv6Address]) -> None:
        """End the connections that nobody has claimed."""
        for place, connection in self._accepted():
            with connection:
                if place.address not in spared and socket_filter.restricted(connection):
                    own_sockets.shut(connection)

    def _accepted(self) -> list[tuple[SocketPlace, socket.socket]]:
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
