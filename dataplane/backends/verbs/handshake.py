"""How two processes exchange their queue pairs: a handshake over a stream socket.

The owner listens on a unix socket without a file (an abstract name, reachable only on its host), or on the TCP address
in `configure(verbs={"listen": ...})`. All messages have a fixed size, and nothing is unpickled.

    initiator  magic, its rails, nonce
    owner      magic, its rails, nonce
    initiator  endpoints, name, for each of its keys HMAC-SHA256(key, "initiator" + all before + endpoints + name)
    owner      endpoints, HMAC-SHA256(key, "owner" + all before + endpoints)

A key is HMAC-SHA256(a key derived from a secret of the job or the user, token + address of the owner). The token and
the address come from the handle; the owner uses the first key of its own under which a proof is good.

A rail is a port that a side uses. Each side numbers its rails in order and sends them as a bit set. Rails that both
sides have sent are connected, each to the one with the same number. There is one endpoint for each of them.

A connection's name is the initiator's nonce. The initiator sends the name of the connection that this one replaces. The
owner destroys its end of that connection before it answers: then packets of an abandoned write that are still on their
way cannot arrive after packets of a later write.

So a process can connect only if it knows a secret and has a handle of that owner. The socket stays open as long as the
queue pairs: when it closes, each side knows that the other one is gone.
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
"""The ends of one side, by rail, in the form for the other side; see `device.ENDPOINT`."""


class Dialled(NamedTuple):
    """A connection at its initiator.

    Attributes:
        socket: Must stay open as long as the queue pairs.
        endpoints: The owner's endpoints, on each rail that both sides have.
        name: For the connection that replaces it.
        key: The key of the proofs, which both sides know, for further proofs.
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
        wire_up_keys: Keys, one of which the owner also has; see `handshake.WireUpKeys`.
        endpoints: Of this side, on the rails that it wants to use.
        deadline: On CLOCK_MONOTONIC.
        replaces: Name of an earlier connection to this owner, on which nothing may arrive any more.

    Raises:
        OwnerDiedError: No process listens there any more.
        TransferError: The owner closes the connection: it knows none of the keys, has another token, no queue pair
            left, or another version. Or both sides have no rail in common.
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
        """Its own endpoints."""

    def connect(self, theirs: Endpoints) -> None:
        """Connect to the initiator's endpoints, or expect its connection."""

    def close(self) -> None:
        """Destroy it."""


@dataclass(slots=True, eq=False)
class VerbsInitiator(Initiator):
    """An initiator of queue pairs.

    Attributes:
        name: Of its connection.
        rails: The rails that both sides have.
        pairs: The owner's end; None until it has proved itself.
    """

    name: bytes = NOBODY
    rails: tuple[int, ...] = ()
    pairs: OwnerEnd | None = None


class QueuePairServer(HandshakeServer[VerbsInitiator]):
    """The owner's side: answers initiators, and keeps their queue pairs while the initiators live."""

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
            listener: From `handshake.bind`; kept.
            address: Of the listener, as text, as in handles.
            token: Of the handles.
            wire_up_keys: Keys, one of which an initiator must have.
            rails: Of this owner.
            make_pairs: Makes this end of a connection on given rails, with the key of its proofs.
        """
        super().__init__(listener, "dataplane-verbs-server", address=address, token=token, wire_up_keys=wire_up_keys)
        self._rails = tuple(rails)
        self._make_pairs = make_pairs
        self._named: dict[bytes, VerbsInitiator] = {}  # proved initiators
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
        if self._named.get(initiator.name) is initiator:  # any process can send a name before its proof
            del self._named[initiator.name]
        initiator.connection.close()
        if initiator.pairs is not None:
            initiator.pairs.close()
