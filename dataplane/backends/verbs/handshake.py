"""How two processes tell each other their queue pairs: a handshake over a stream socket.

This file has what is said, and the initiator's side of it; the owner's is `handshake_server`.

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
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from skipper.dataplane.backends.handshake import Handshake
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
                raise TransferError("the owner uses other RDMA ports, none of those that would be tried from here")
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
