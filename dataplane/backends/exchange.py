"""What the conversations have in common by which two processes prove to each other that they belong together.

An owner of memory listens on a unix socket without a file (an abstract name, reachable on its host only), or on a TCP
address. Messages have fixed sizes, and nothing is unpickled. Each side proves two things with an HMAC over fresh nonces
and all that was said: that it knows a secret that the other one knows, that of the job or of the user, and that it
means this owner, by the token and the address that are in every handle of it. So neither a handle that was read on its
way opens anything, nor a secret without a handle.

A process may have several secrets, and does not tell a stranger which. So the first proof of a conversation comes once
for each secret of its sender, `MOST_KEYS` times altogether, and the owner answers under the first that it knows.
"""

import hmac
import os
import secrets
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from skipper.dataplane.errors import BackendUnavailableError, TransferError
from skipper.dataplane.keys import MOST_KEYS

TOKEN_BYTES = 16
DIGEST_BYTES = 32
PROOFS_BYTES = MOST_KEYS * DIGEST_BYTES
"""Of a message that is proved by each secret."""

WireUpKeys = Callable[[], tuple[bytes, ...]]
"""Returns a key for each secret that this process has now, the job's first; see `keys.Keys.derived`."""

GREETING_S = 5.0
"""For the whole conversation."""
MOST_STRANGERS = 64
"""Connections to an owner that have not proved themselves yet."""
MOST_ALIKE = 16
"""Those of them that come from one address, or from one user of this host."""

_CREDENTIALS = struct.Struct("3i")  # ucred of unix(7)


def proof_keys(wire_up_keys: Sequence[bytes], token: bytes, address: str) -> tuple[bytes, ...]:
    """What the proofs of a conversation with one owner are made with, for each key in turn."""
    return tuple([hmac.digest(key, token + address.encode(), "sha256") for key in wire_up_keys[:MOST_KEYS]])


def prove(key: bytes, role: bytes, *transcript: bytes) -> bytes:
    """What shows that a side knows the key, and that it was it who said all that, of fixed sizes."""
    return hmac.digest(key, role + b"".join(transcript), "sha256")


def prove_by_each(keys: Sequence[bytes], role: bytes, *transcript: bytes) -> bytes:
    """A proof for each of these keys; what is missing of `MOST_KEYS` nobody can tell from one."""
    proofs = [prove(key, role, *transcript) for key in keys]
    return b"".join(proofs) + secrets.token_bytes(PROOFS_BYTES - len(proofs) * DIGEST_BYTES)


def proves(proof: bytes, key: bytes, role: bytes, *transcript: bytes) -> bool:
    """Whether that is such a proof, in time that does not depend on where they differ."""
    return hmac.compare_digest(proof, prove(key, role, *transcript))


def proved_by(proofs: bytes, keys: Sequence[bytes], role: bytes, *transcript: bytes) -> bytes | None:
    """The first of these keys under which one of the proofs is good; None where there is none."""
    told = [proofs[at : at + DIGEST_BYTES] for at in range(0, len(proofs), DIGEST_BYTES)]
    for key in keys:
        if any(proves(proof, key, role, *transcript) for proof in told):
            return key
    return None


def is_kindred(magic: bytes, own: bytes) -> bool:
    """Whether that is the magic of some version of a conversation: its sender is told ours before it is hung up on."""
    return magic[:-1] == own[:-1]


def bind(listen: str | None, name: str) -> tuple[socket.socket, str]:
    """A listening socket and its address as text: "unix:NAME" or "tcp:HOST:PORT".

    Args:
        listen: "HOST:PORT" for TCP, port 0 for any; None for the unix socket.
        name: Of the unix socket.

    Raises:
        BackendUnavailableError: The address cannot be had.
    """
    host, _, port = (listen or "").rpartition(":")
    host = host.strip("[]")
    try:
        if listen is None:
            where: Any = f"\0{name}"
            listener = socket.socket(socket.AF_UNIX)
        else:
            family, kind, _, _, where = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
            listener = socket.socket(family, kind)
    except (OSError, ValueError) as error:
        raise BackendUnavailableError(f"cannot listen on {listen or name}: {error}") from error
    try:
        listener.bind(where)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise BackendUnavailableError(f"cannot listen on {listen or name}: {error}") from error
    listener.setblocking(False)
    return listener, f"unix:{name}" if listen is None else f"tcp:{host}:{listener.getsockname()[1]}"


def socket_for(address: str) -> socket.socket:
    """A socket to connect to an address of `bind` with.

    Raises:
        OSError: No descriptor is left.
    """
    where = target(address)
    if isinstance(where, str):
        return socket.socket(socket.AF_UNIX)
    connection = socket.socket(socket.AF_INET6 if ":" in where[0] else socket.AF_INET)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def target(address: str) -> "str | tuple[str, int]":
    """An address of `bind` as `socket.connect` takes it."""
    kind, _, where = address.partition(":")
    if kind == "unix":
        return f"\0{where}"
    host, _, port = where.rpartition(":")
    return host, int(port)


def is_target(address: str) -> bool:
    """Whether that is an address as `bind` returns it."""
    kind, _, where = address.partition(":")
    if kind == "unix":
        return bool(where)
    host, _, port = where.rpartition(":")
    return kind == "tcp" and bool(host) and port.isdecimal() and 0 < int(port) <= 0xFFFF


def set_timeout(connection: socket.socket, deadline: float) -> None:
    """Have the next call on a socket end by a deadline.

    Raises:
        TimeoutError: It has passed.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    connection.settimeout(left)


def receive(connection: socket.socket, nbytes: int, deadline: float) -> bytes:
    """So many bytes of the owner.

    Raises:
        TransferError: It hangs up.
        TimeoutError: The deadline has passed.
    """
    received = b""
    while len(received) < nbytes:
        set_timeout(connection, deadline)
        part = connection.recv(nbytes - len(received))
        if not part:
            raise TransferError(
                "the owner hung up: it knows no secret of this process, is not that of the handle (a wrong token), "
                "is of another version of Skipper, or has too many visitors"
            )
        received += part
    return received


class Strangers:
    """Counts who has not proved itself yet, so that none of them keeps the others out."""

    def __init__(self) -> None:
        self._count = 0
        self._alike: Counter[Hashable] = Counter()

    def enter(self, connection: socket.socket) -> Hashable | None:
        """Count one in: what it is to `leave` by; None where there are too many."""
        try:
            origin = _origin(connection)
        except OSError:
            return None  # it has left
        if self._count >= MOST_STRANGERS or self._alike[origin] >= MOST_ALIKE:
            return None
        self._count += 1
        self._alike[origin] += 1
        return origin

    def leave(self, origin: Hashable) -> None:
        """It has proved itself, or is gone."""
        self._count -= 1
        self._alike[origin] -= 1
        if not self._alike[origin]:
            del self._alike[origin]


def _origin(connection: socket.socket) -> Hashable:
    """Where a connection comes from: an address, or a user of this host."""
    if connection.family != socket.AF_UNIX:
        return str(connection.getpeername()[0])
    _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    # The processes of one job are many, and not to be kept out by each other: they count as one only to strangers.
    return (uid, connection.fileno()) if uid == os.getuid() else uid
