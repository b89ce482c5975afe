"""How a process gets access to UCX's TCP port of another one: a handshake before it connects.

UCX itself requires no proof: a process that connects to its port may read and write everything that the owner can. So
the kernel closes that port to all processes (`socket_filter`) except those that the owner has named.

    initiator  magic, nonce
    owner      magic, nonce
    initiator  the addresses that it will connect from, for each of its keys HMAC-SHA256(key, "sources" + all before)
    owner      the places where its UCX listens, HMAC-SHA256(key, "listeners" + all before)
    initiator  the ends of its connections to there, HMAC-SHA256(key, "connections" + all before)
    owner      how many of them it has found, HMAC-SHA256(key, "found" + all before)

A key is HMAC-SHA256(a key derived from a secret of the job or the user, token + address of the handshake). The token
and the address come from the handle; the owner uses the first key of its own under which a proof is good. After the
third message the kernel lets those addresses connect, but delivers no data. The initiator sends the fifth message once
it is connected and before it sends anything over the connections. After it, data are delivered on exactly these
connections; other connections that have come in are closed, and so is the port. All messages have a fixed size.
"""

import contextlib
import ipaddress
import secrets
import socket
import struct
import time
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from skipper.dataplane.backends.handshake import (
    DIGEST_BYTES,
    GREETING_S,
    PROOFS_BYTES,
    TOKEN_BYTES,
    Handshake,
    HandshakeServer,
    Initiator,
    WireUpKeys,
    bind,
    is_target,
)
from skipper.dataplane.errors import DescriptorError, TransferError
from skipper.trust import own_sockets, socket_filter
from skipper.trust.own_sockets import PLACE_BYTES, SocketPlace

MAGIC = b"SKu2"
HELLO = struct.Struct("<4s16s")
MOST_PLACES = 8
PLACES = struct.Struct(f"<B{MOST_PLACES * PLACE_BYTES}s")
FOUND = struct.Struct("<B")

_LOOK_S = 0.0005
_STRAY_S = 0.1  # for a socket that still connects when another is connected: it may belong to other code
_PROVED_S = 20.0  # for the rest of the handshake, once an initiator has proved itself
_ACCEPTED_LOOK_S = 0.001  # between two looks at whether UCX has accepted a connection

# How many bytes an initiator's messages have, without the greeting.
_SOURCES_BYTES = PLACES.size + PROOFS_BYTES
_CONNECTIONS_BYTES = PLACES.size + DIGEST_BYTES


@dataclass(frozen=True, slots=True)
class Contact:
    """What a handle says about an owner whose UCX listens on TCP.

    Attributes:
        token: Identifies the owner.
        address: Where the owner listens for the handshake, as `handshake.bind` returns it.
        within_host: Whether it is reached over TCP even from its own host.
    """

    token: bytes
    address: str
    within_host: bool = False

    def pack(self) -> bytes:
        """As bytes, for a card."""
        return self.token + bytes([self.within_host]) + self.address.encode("ascii")

    @classmethod
    def parse(cls, raw: bytes) -> Self | None:
        """From bytes; None if there are none, since UCX does not listen.

        Raises:
            DescriptorError: They are damaged.
        """
        if not raw:
            return None
        token, within_host, text = raw[:TOKEN_BYTES], raw[TOKEN_BYTES:][:1], raw[TOKEN_BYTES + 1 :]
        address = text.decode("ascii") if text.isascii() else ""
        if within_host not in (b"\0", b"\1") or not is_target(address):
            raise DescriptorError("this buffer handle has a damaged section for UCX")
        return cls(token, address, within_host == b"\1")


class Admission:
    """A handshake after which the owner lets this process connect; to be closed once this process has connected.

    Attributes:
        listeners: Where the owner's UCX listens.
    """

    def __init__(
        self, contact: Contact, wire_up_keys: Sequence[bytes], sources: Iterable[SocketPlace], deadline: float
    ) -> None:
        """Ask the owner for access.

        Args:
            contact: Of the owner.
            wire_up_keys: Keys, one of which the owner also has; see `handshake.WireUpKeys`.
            sources: The addresses from which this process will connect; their ports do not matter.
            deadline: On CLOCK_MONOTONIC.

        Raises:
            OwnerDiedError: No process listens there any more.
            TransferError: The owner closes the connection: it knows none of the keys, has another token or too many
                initiators. Or it has another version.
            TransferTimeoutError: The deadline passed.
        """
        self._contact = contact
        self._deadline = deadline
        self._known: Mapping[int, int] = {}
        self.listeners: frozenset[SocketPlace] = frozenset()
        self._handshake = shake = Handshake(contact.address, contact.token, wire_up_keys, deadline)
        try:
            with shake.errors():
                shake.greet(HELLO.pack(MAGIC, secrets.token_bytes(16)), MAGIC)
                own = SocketPlace.of(shake.socket.getsockname()) if shake.socket.family != socket.AF_UNIX else None
                shake.say(b"sources", pack_places([*sources, *([own] if own else ())]))
                self.listeners = frozenset(parse_places(shake.hear(b"listeners", PLACES.size)))
                self._known = own_sockets.descriptors()
        except BaseException:
            shake.close()
            raise

    def connected(self) -> None:
        """Tell the owner which connections belong to this process, once they stand; then data are delivered on them.

        Raises:
            OwnerDiedError, TransferError, TransferTimeoutError: As above; or the owner has not seen one of them.
        """
        with self._handshake.errors():
            own = self._own_ends()
            self._handshake.say(b"connections", pack_places(own))
            (found,) = FOUND.unpack(self._handshake.hear(b"found", FOUND.size))
        if found < len(own):
            raise TransferError(
                f"the owner on {self._contact.address} has not seen this process connect: the addresses between them "
                "are translated, or another route is taken than that of the devices that UCX was told to use"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handshake.close()

    def _own_ends(self) -> list[SocketPlace]:
        """This end of each connection to the owner that was begun since it gave access."""
        stray = self._deadline
        while True:
            found, connecting = [], False
            for _, copy in own_sockets.opened(self._known):
                both = own_sockets.ends(copy)
                if both is not None and both[1] in self.listeners:
                    found.append(both[0])
                connecting = connecting or own_sockets.state(copy) == own_sockets.CONNECTING
            now = time.monotonic()
            if found and connecting:
                stray = min(stray, now + _STRAY_S)
            if not connecting or now >= stray:
                if now >= self._deadline:
                    raise TimeoutError
                return found[:MOST_PLACES]
            time.sleep(_LOOK_S)


def pack_places(places: Iterable[SocketPlace]) -> bytes:
    """A message with the first `MOST_PLACES` of them."""
    packed = [place.pack() for place in places][:MOST_PLACES]
    return PLACES.pack(len(packed), b"".join(packed))


def parse_places(message: bytes) -> list[SocketPlace]:
    """The places of a message."""
    count, packed = PLACES.unpack(message)
    used = min(count, MOST_PLACES)
    return [SocketPlace.parse(packed[at * PLACE_BYTES :][:PLACE_BYTES]) for at in range(used)]


@dataclass(slots=True, eq=False)
class AdmissionInitiator(Initiator):
    """An initiator that asks for access.

    Attributes:
        sources: The addresses from which it may connect now.
        expected: Its ends of the connections that it has claimed and UCX has not accepted yet.
        claimed: How many it has claimed.
    """

    sources: frozenset[ipaddress.IPv6Address] = frozenset()
    expected: set[SocketPlace] = field(default_factory=set)
    claimed: int = 0


class AdmissionServer(HandshakeServer[AdmissionInitiator]):
    """Lets proved initiators connect to UCX. The port is closed to all others."""

    def __init__(
        self, listeners: Sequence[socket.socket], address: str, wire_up_keys: WireUpKeys, *, within_host: bool
    ) -> None:
        """Close UCX's listening sockets to all, and listen for initiators that ask for access.

        Args:
            listeners: Copies of UCX's sockets, kept; closed already by `socket_filter.admit`.
            address: The IP at which to listen.
            wire_up_keys: Keys, one of which an initiator must have.
            within_host: For `Contact`.

        Raises:
            BackendUnavailableError: It cannot listen there.
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
        self._elsewhere: dict[int, int] = {}  # descriptors that are not UCX's connections
        self._begin()

    def _initiator(self, connection: socket.socket, origin: Hashable, due: float) -> AdmissionInitiator:
        return AdmissionInitiator(connection, origin, due, HELLO.size)

    def _stays(self, initiator: AdmissionInitiator, now: float) -> bool:
        return (not initiator.silent or self._looked_for(initiator)) and now <= initiator.due

    def _patience(self) -> float | None:
        if any(initiator.silent for initiator in self._initiators.values()):
            return _ACCEPTED_LOOK_S
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
        """Open the connections that an initiator has claimed; returns whether some have not been accepted yet."""
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
        """Close the port to it, and end the connections that it did not claim."""
        self._close_to(initiator)
        initiator.connection.close()

    def _close_to(self, initiator: AdmissionInitiator) -> None:
        """Allow no more connections from its addresses, and end unclaimed ones. Idempotent."""
        if initiator.sources:
            initiator.sources = frozenset()
            self._restrict()
            self._sweep(self._admitted)

    def _restrict(self) -> None:
        """Let only the addresses connect that an initiator has named."""
        wanted = frozenset().union(*(initiator.sources for initiator in self._initiators.values()))
        if wanted != self._admitted:
            for listener in self._ucx_listeners:
                socket_filter.admit(listener, wanted)
            self._admitted = wanted

    def _sweep(self, spared: Collection[ipaddress.IPv6Address]) -> None:
        """End the connections that no initiator has claimed."""
        for place, connection in self._accepted():
            with connection:
                if place.address not in spared and socket_filter.restricted(connection):
                    own_sockets.shut(connection)

    def _accepted(self) -> list[tuple[SocketPlace, socket.socket]]:
        """The connections that UCX has accepted, by their other ends; copies, to be closed."""
        found = []
        now = own_sockets.descriptors()
        new = {fd: inode for fd, inode in now.items() if self._elsewhere.get(fd) != inode}
        self._elsewhere = {fd: inode for fd, inode in now.items() if fd not in new}
        for fd, inode in new.items():
            copy = own_sockets.copy_of(fd, inode)
            if copy is None:
                continue
            both = own_sockets.ends(copy)
            if both is not None and both[0] in self._places:
                found.append((both[1], copy))
            else:
                copy.close()
                if both is not None:
                    self._elsewhere[fd] = inode
        return found
