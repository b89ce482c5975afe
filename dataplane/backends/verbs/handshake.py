"""How two processes tell each other their queue pairs: a handshake over a stream socket.

The owner listens on a unix socket without a file (an abstract name, reachable on its host only), or on the TCP address
that `configure(verbs={"listen": ...})` names. All messages have a fixed size, nothing is unpickled.

    initiator  magic, its rails, nonce
    owner      magic, its rails, nonce
    initiator  endpoints, name, for each of its keys HMAC-SHA256(key, "initiator" + all before + endpoints + name)
    owner      endpoints, HMAC-SHA256(key, "owner" + all before + endpoints)

A key is HMAC-SHA256(what a secret of the job or the user gives for this, token + address of the owner), where the token
and the address are those of the handle; the owner uses the first key of its own that a proof is good under.

A rail is a port that a side uses; rails are numbered by their order on each side, told as a set of bits, and those that
both sides named are connected, each to the one of the same number. There is one endpoint for each of them.

A connection's name is the initiator's nonce. The name that the initiator sends is that of the connection which this one
replaces. The owner destroys its end of that before it answers: packets of a write that was given up, and that are still
on their way, can then not arrive after those of a later one.

So who knows a secret and holds a handle of that owner can connect, and nobody else. The socket stays open as long as
the queue pairs: its end tells either side that the other one is gone.
"""

import secrets
import socket
import struct
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from skipper.dataplane.backends.handshake import (
    GREETING_S,
    PROOFS_BYTES,
    Handshake,
    HandshakeServer,
    Initiator,
    WireUpKeys,
)
from skipper.dataplane.backends.verbs.device import ENDPOINT
from skipper.dataplane.errors import TransferError

NOBODY = bytes(16)
"""Name of a connection that does not exist."""

HELLO = struct.Struct("<4sB16s")
MAGIC = b"SKv4"

Endpoints = Mapping[int, bytes]
"""The ends of one side, by rail, as the other side must know them; see `device.ENDPOINT`."""


class Dialled(NamedTuple):
    """A connection as its initiator has it.

    Attributes:
        socket: To be kept as long as the queue pairs.
        endpoints: The owner's, on each rail that both sides have.
        name: For the connection that replaces it.
        key: That of the proofs, which both sides know, for what else is to be proved.
    """

    socket: socket.socket
    endpoints: dict[int, bytes]
    name: bytes
    key: bytes


def dial(
    address: str,
    token: bytes,
    wire_up_keys: Sequence[bytes],
    endpoints: Endpoints,
    deadline: float,
    *,
    replaces: bytes = NOBODY,
) -> Dialled:
    """Connect to an owner.

    Args:
        address: Where it listens.
        token: Of the handle.
        wire_up_keys: One of which the owner has, too; see `handshake.WireUpKeys`.
        endpoints: Of this side, on the rails that it would use.
        deadline: On CLOCK_MONOTONIC.
        replaces: Name of an earlier connection to this owner, over which nothing must arrive any more.

    Raises:
        OwnerDiedError: Nobody listens there any more.
        TransferError: The owner hangs up: it knows none of the keys, has another token or no queue pair left, or is of
            another version. Or both sides have no rail in common.
        TransferTimeoutError: The deadline (CLOCK_MONOTONIC) passed.
    """
    shake = Handshake(address, token, wire_up_keys, deadline)
    try:
        with shake.errors():
            name = secrets.token_bytes(len(NOBODY))
            _, bits, _ = HELLO.unpack(shake.greet(HELLO.pack(MAGIC, bits_of(endpoints), name), MAGIC))
            used = tuple(rail for rail in endpoints if bits >> rail & 1)
            if not used:
                raise TransferError("the owner uses other RDMA ports, none of which this process would try")
            shake.say(b"initiator", b"".join(endpoints[rail] for rail in used) + replaces)
            other = shake.hear(b"owner", len(used) * ENDPOINT.size)
            assert shake.key is not None
    except BaseException:
        shake.close()
        raise
    shake.socket.setblocking(False)
    return Dialled(shake.socket, by_rail(other, used), name, shake.key)


def hung_up(connection: socket.socket) -> bool:
    """Whether the other end of an idle connection is gone."""
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def bits_of(rails: Iterable[int]) -> int:
    """A set of rails as one number."""
    return sum(1 << rail for rail in rails)


def by_rail(endpoints: bytes, rails: Iterable[int]) -> dict[int, bytes]:
    """The endpoints of a message, by rail."""
    return {rail: endpoints[at * ENDPOINT.size :][: ENDPOINT.size] for at, rail in enumerate(rails)}


class OwnerEnd(Protocol):
    """The owner's end of a connection; see `connection.OwnerQueuePairs`."""

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
