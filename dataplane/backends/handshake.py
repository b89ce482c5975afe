"""The handshakes by which two processes prove to each other that they belong together, before anything is parsed.

Backends add what is said: UCX in `ucx.admission`, verbs in `verbs.handshake`. This file has the rules for all of them
and the side of the *initiator*, who connects to an *owner* of memory; the owner's side is `handshake_server`.

An owner listens on a unix socket without a file (an abstract name, reachable on its host only), or on a TCP address.
Messages have fixed sizes, and nothing is unpickled. Each side proves two things with an HMAC over fresh nonces and all
that was said before: that it knows a secret that the other one knows, that of the job or of the user, and that it means
this owner, by the token and the address that are in every handle of the owner. So neither a handle that was read on its
way nor a secret without a handle opens anything.

A process may have several secrets, and does not tell a stranger which. So the first proof of a handshake comes once for
each secret of its sender, `MOST_KEYS` times altogether, and the owner answers under the first that it knows.
"""

import contextlib
import hmac
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from skipper.dataplane.errors import BackendUnavailableError, OwnerDiedError, TransferError, TransferTimeoutError
from skipper.dataplane.keys import MOST_KEYS

TOKEN_BYTES = 16
DIGEST_BYTES = 32
PROOFS_BYTES = MOST_KEYS * DIGEST_BYTES
"""Length of the proofs of a message that is proved by each secret."""

_TCP = re.compile(r"[0-9A-Za-z.:_%-]{1,253}:[0-9]{1,5}")

WireUpKeys = Callable[[], tuple[bytes, ...]]
"""Returns a key for each secret that this process has now, the job's first; see `keys.Keys.derived`."""


def proof_keys(wire_up_keys: Sequence[bytes], token: bytes, address: str) -> tuple[bytes, ...]:
    """The keys that the proofs of a handshake with one owner are made with, for each wire-up key in turn."""
    return tuple([hmac.digest(key, token + address.encode(), "sha256") for key in wire_up_keys[:MOST_KEYS]])


def prove(key: bytes, role: bytes, *transcript: bytes) -> bytes:
    """Shows that a side knows the key and has said all of the transcript, whose messages have fixed sizes."""
    return hmac.digest(key, role + b"".join(transcript), "sha256")


def prove_by_each(keys: Sequence[bytes], role: bytes, *transcript: bytes) -> bytes:
    """A proof for each of these keys, and random bytes up to `MOST_KEYS` of them, which look the same."""
    proofs = [prove(key, role, *transcript) for key in keys]
    return b"".join(proofs) + secrets.token_bytes(PROOFS_BYTES - len(proofs) * DIGEST_BYTES)


def proves(proof: bytes, key: bytes, role: bytes, *transcript: bytes) -> bool:
    """Whether that is such a proof; takes as long wherever they differ."""
    return hmac.compare_digest(proof, prove(key, role, *transcript))


def proved_by(proofs: bytes, keys: Sequence[bytes], role: bytes, *transcript: bytes) -> bytes | None:
    """The first of these keys under which one of the proofs is good; None where there is none."""
    told = [proofs[at : at + DIGEST_BYTES] for at in range(0, len(proofs), DIGEST_BYTES)]
    for key in keys:
        if any(proves(proof, key, role, *transcript) for proof in told):
            return key
    return None


def is_kindred(magic: bytes, own: bytes) -> bool:
    """Whether that is the magic of some version of a handshake; its sender is told ours before we hang up."""
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
    return kind == "tcp" and bool(_TCP.fullmatch(where)) and 0 < int(where.rpartition(":")[2]) <= 0xFFFF


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
    """Receive `nbytes` bytes from the owner.

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
                "is of another version of Skipper, or has too many connections that have not proved themselves"
            )
        received += part
    return received


class Handshake:
    """The initiator's side of one handshake.

    Attributes:
        socket: Connected to the owner after `greet`.
        key: The key under which the owner has answered; None before it has.
    """

    def __init__(self, address: str, token: bytes, wire_up_keys: Sequence[bytes], deadline: float) -> None:
        """Prepare; nothing is sent.

        Args:
            address: Where the owner listens, as `bind` returns it.
            token: Of the handle.
            wire_up_keys: One of which the owner has, too; see `WireUpKeys`.
            deadline: On CLOCK_MONOTONIC.

        Raises:
            TransferError: No file descriptor is left.
        """
        self._address = address
        self._deadline = deadline
        self._keys = proof_keys(wire_up_keys, token, address)
        self._transcript = b""
        self.key: bytes | None = None
        try:
            self.socket = socket_for(address)
        except OSError as error:
            message = f"no socket for a connection to {address}: {error}"
            raise TransferError(message, status=error.errno) from error

    def greet(self, mine: bytes, magic: bytes) -> bytes:
        """Connect and send a greeting. Returns that of the owner, as long as ours and with the same magic.

        Raises:
            OSError: As `errors` translates it.
            TransferError: The owner hangs up, or is of another version.
        """
        set_timeout(self.socket, self._deadline)
        self.socket.connect(target(self._address))
        self.socket.sendall(mine)
        theirs = receive(self.socket, len(mine), self._deadline)
        if theirs[: len(magic)] != magic:
            raise TransferError(f"who listens on {self._address} is no owner of this version of Skipper")
        self._transcript = mine + theirs
        return theirs

    def say(self, role: bytes, message: bytes) -> None:
        """Send a message with its proofs.

        Raises:
            OSError: As `errors` translates it.
        """
        self._transcript += message
        if self.key is None:
            message += prove_by_each(self._keys, role, self._transcript)
        else:
            message += prove(self.key, role, self._transcript)
        set_timeout(self.socket, self._deadline)
        self.socket.sendall(message)

    def hear(self, role: bytes, nbytes: int) -> bytes:
        """A message of the owner, of that many bytes, whose proof was good.

        Raises:
            OSError: As `errors` translates it.
            TransferError: The owner hangs up, or the proof is not good.
        """
        answer = receive(self.socket, nbytes + DIGEST_BYTES, self._deadline)
        message, proof = answer[:-DIGEST_BYTES], answer[-DIGEST_BYTES:]
        self._transcript += message
        self.key = proved_by(proof, self._keys if self.key is None else (self.key,), role, self._transcript)
        if self.key is None:
            raise TransferError(f"who listens on {self._address} is not the owner that the handle names")
        return message

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Turns what goes wrong with the socket into errors of this package.

        Raises:
            OwnerDiedError: Nobody listens there any more.
            TransferError: The connection failed.
            TransferTimeoutError: The deadline passed.
        """
        try:
            yield
        except TransferError:
            raise
        except TimeoutError:
            raise TransferTimeoutError(
                f"the deadline passed before the owner on {self._address} had answered"
            ) from None
        except ConnectionRefusedError:
            raise OwnerDiedError(f"nobody listens on {self._address} any more: the owner is gone") from None
        except OSError as error:
            message = f"no connection to the owner on {self._address}: {error}"
            raise TransferError(message, status=error.errno) from error

    def close(self) -> None:
        """Hang up. Idempotent."""
        self.socket.close()
