"""The handshakes by which two processes prove that they belong together, before anything is parsed.

This file has the rules that hold for all handshakes; UCX adds its messages in `ucx.admission`, verbs in
`verbs.handshake`. An *initiator* connects to an *owner* of memory.

An owner listens on a unix socket without a file (an abstract name, reachable only on its host), or on a TCP address.
Messages have fixed sizes, and nothing is unpickled. Each side proves two things with an HMAC over fresh nonces and all
earlier messages: that it knows a secret of the other side (the job's or the user's), and that it means this owner, by
the token and the address that are in every handle of the owner. So neither an intercepted handle nor a secret without a
handle is enough.

A process may have several secrets, and does not tell an unknown peer which ones. So the first message with a proof
contains one for each secret of its sender, filled up to `MOST_KEYS` proofs. The owner answers with the first key that
it knows.
"""

import contextlib
import hmac
import os
import re
import secrets
import selectors
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from skipper.dataplane.errors import (
    BackendUnavailableError,
    DataplaneError,
    OwnerDiedError,
    TransferError,
    TransferTimeoutError,
)
from skipper.dataplane.keys import MOST_KEYS

TOKEN_BYTES = 16
DIGEST_BYTES = 32
PROOFS_BYTES = MOST_KEYS * DIGEST_BYTES
"""Length of the proofs of a message that has one for each secret."""

_TCP = re.compile(r"[0-9A-Za-z.:_%-]{1,253}:[0-9]{1,5}")

WireUpKeys = Callable[[], tuple[bytes, ...]]
"""Returns a key for each secret that this process has now, the job's first; see `keys.Keys.derived`."""

GREETING_S = 5.0
"""Seconds for a whole handshake."""
MOST_UNPROVED = 64
"""The most connections to an owner that have not proved themselves yet."""
MOST_ALIKE = 16
"""The same for connections from one address, or from one user of this host."""

_JOIN_S = 5.0
_CREDENTIALS = struct.Struct("3i")  # ucred of unix(7)


def proof_keys(wire_up_keys: Sequence[bytes], token: bytes, address: str) -> tuple[bytes, ...]:
    """The keys for the proofs of a handshake with one owner, one for each wire-up key."""
    return tuple([hmac.digest(key, token + address.encode(), "sha256") for key in wire_up_keys[:MOST_KEYS]])


def prove(key: bytes, role: bytes, *transcript: bytes) -> bytes:
    """Proves that a side knows the key and agrees on the transcript, whose messages have fixed sizes."""
    return hmac.digest(key, role + b"".join(transcript), "sha256")


def prove_by_each(keys: Sequence[bytes], role: bytes, *transcript: bytes) -> bytes:
    """A proof for each of these keys, filled up to `MOST_KEYS` with random bytes, which look the same."""
    proofs = [prove(key, role, *transcript) for key in keys]
    return b"".join(proofs) + secrets.token_bytes(PROOFS_BYTES - len(proofs) * DIGEST_BYTES)


def proved_by(proofs: bytes, keys: Sequence[bytes], role: bytes, *transcript: bytes) -> bytes | None:
    """The first of these keys under which one of the proofs is good; None if there is none."""
    told = [proofs[at : at + DIGEST_BYTES] for at in range(0, len(proofs), DIGEST_BYTES)]
    for key in keys:
        good = prove(key, role, *transcript)
        if any(hmac.compare_digest(proof, good) for proof in told):  # takes the same time wherever they differ
            return key
    return None


def bind(listen: str | None, name: str) -> tuple[socket.socket, str]:
    """A listening socket and its address as text: "unix:NAME" or "tcp:HOST:PORT".

    Args:
        listen: "HOST:PORT" for TCP, port 0 for any; None for the unix socket.
        name: Of the unix socket.

    Raises:
        BackendUnavailableError: The address cannot be used.
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
    """A socket for a connection to an address of `bind`.

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
    """An address of `bind` in the form for `socket.connect`."""
    kind, _, where = address.partition(":")
    if kind == "unix":
        return f"\0{where}"
    host, _, port = where.rpartition(":")
    return host, int(port)


def is_target(address: str) -> bool:
    """Whether this is an address such as `bind` returns."""
    kind, _, where = address.partition(":")
    if kind == "unix":
        return bool(where)
    return kind == "tcp" and bool(_TCP.fullmatch(where)) and 0 < int(where.rpartition(":")[2]) <= 0xFFFF


def set_timeout(connection: socket.socket, deadline: float) -> None:
    """Make the next call on a socket end by a deadline.

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
        TransferError: The owner closes the connection.
        TimeoutError: The deadline has passed.
    """
    received = b""
    while len(received) < nbytes:
        set_timeout(connection, deadline)
        part = connection.recv(nbytes - len(received))
        if not part:
            raise TransferError(
                "the owner closed the connection: it does not know the secret of this process, is not that of the "
                "handle (a wrong token), "
                "is of another version of Skipper, or has too many connections that have not proved themselves"
            )
        received += part
    return received


class Handshake:
    """The initiator's side of one handshake.

    Attributes:
        socket: Connected to the owner after `greet`.
        key: The key under which the owner has answered; None before.
    """

    def __init__(self, address: str, token: bytes, wire_up_keys: Sequence[bytes], deadline: float) -> None:
        """Prepare; nothing is sent.

        Args:
            address: Where the owner listens, as `bind` returns it.
            token: Of the handle.
            wire_up_keys: Keys, one of which the owner also has; see `WireUpKeys`.
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
        """Connect and send a greeting. Returns the owner's greeting, which has the same length and magic.

        Raises:
            OSError: As `errors` translates it.
            TransferError: The owner closes the connection, or has another version.
        """
        set_timeout(self.socket, self._deadline)
        self.socket.connect(target(self._address))
        self.socket.sendall(mine)
        theirs = receive(self.socket, len(mine), self._deadline)
        if theirs[: len(magic)] != magic:
            raise TransferError(f"the process that listens on {self._address} does not run this version of Skipper")
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
        """Receive a message of that many bytes from the owner, and check its proof.

        Raises:
            OSError: As `errors` translates it.
            TransferError: The owner hangs up, or the proof is not good.
        """
        answer = receive(self.socket, nbytes + DIGEST_BYTES, self._deadline)
        message, proof = answer[:-DIGEST_BYTES], answer[-DIGEST_BYTES:]
        self._transcript += message
        self.key = proved_by(proof, self._keys if self.key is None else (self.key,), role, self._transcript)
        if self.key is None:
            raise TransferError(f"the process that listens on {self._address} is not the owner that the handle names")
        return message

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Turns errors of the socket into errors of this package.

        Raises:
            OwnerDiedError: No process listens there any more.
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
            raise OwnerDiedError(f"nothing listens on {self._address}: the owner is gone") from None
        except OSError as error:
            message = f"no connection to the owner on {self._address}: {error}"
            raise TransferError(message, status=error.errno) from error

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self.socket.close()


@dataclass(slots=True, eq=False)
class Initiator:
    """An initiator as the owner sees it.

    Attributes:
        connection: Its socket.
        origin: Where it comes from, see `UnprovedInitiators.enter`.
        due: When the handshake has to be over, on CLOCK_MONOTONIC.
        wanted: Size of the next message, in bytes.
        proved: Whether it has proved itself.
        silent: Whether it must send nothing more: anything that it sends ends it.
        received: The part of the next message that has come.
        transcript: All messages of both sides, without proofs.
        keys: Keys that its proofs may use; only the used one, once it has proved itself.
    """

    connection: socket.socket
    origin: Hashable
    due: float
    wanted: int
    proved: bool = False
    silent: bool = False
    received: bytearray = field(default_factory=bytearray)
    transcript: bytes = b""
    keys: tuple[bytes, ...] = ()


InitiatorT = TypeVar("InitiatorT", bound=Initiator)


class HandshakeServer(ABC, Generic[InitiatorT]):
    """One daemon thread that runs the handshakes. All methods but `close` are called on that thread."""

    def __init__(
        self,
        listener: socket.socket,
        name: str,
        *,
        address: str,
        token: bytes,
        wire_up_keys: WireUpKeys,
        others: Sequence[socket.socket] = (),
    ) -> None:
        """Prepare; a subclass calls `_begin` when it is ready.

        Args:
            listener: The socket where initiators connect, from `handshake.bind`; kept.
            name: Of the thread.
            address: Of the listener, as text, as in handles.
            token: Of the handles.
            wire_up_keys: Keys, one of which an initiator must have.
            others: Sockets that are closed with the listener.
        """
        self._listener = listener
        self._others = tuple(others)
        self._address = address
        self._token = token
        self._wire_up_keys = wire_up_keys
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._wake, self._waker = socket.socketpair()
        self._selector.register(self._waker, selectors.EVENT_READ)
        self._unproved = UnprovedInitiators()
        self._initiators: dict[int, InitiatorT] = {}  # by descriptor
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def close(self) -> None:
        """Close all connections and end the thread. Idempotent."""
        if not self._closing:
            self._wake.send(b"x")  # first: the thread, which may be awake, closes the socket once it sees the flag
            self._closing = True
            self._thread.join(_JOIN_S)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @abstractmethod
    def _initiator(self, connection: socket.socket, origin: Hashable, due: float) -> InitiatorT:
        """A new initiator, whose greeting is due."""

    @abstractmethod
    def _understand(self, initiator: InitiatorT, message: bytes) -> bool:
        """Take a message; returns whether the handshake continues. An answer must fit into any socket's buffer."""

    @abstractmethod
    def _stays(self, initiator: InitiatorT, now: float) -> bool:
        """Whether it may stay; called after every event and after `_patience`."""

    @abstractmethod
    def _patience(self) -> float | None:
        """After how many seconds without an event to check the initiators; None: never."""

    @abstractmethod
    def _part(self, initiator: InitiatorT) -> None:
        """Close its connection, and undo what was done for it. It is no longer among the initiators."""

    def _begin(self) -> None:
        self._thread.start()

    def _greet(self, initiator: InitiatorT, theirs: bytes, mine: bytes, magic: bytes) -> bool:
        """Answer a greeting; returns whether the initiator has this version."""
        if theirs[: len(magic) - 1] != magic[:-1]:
            return False  # an initiator of another version gets ours before the connection closes
        initiator.transcript = theirs + mine
        initiator.connection.sendall(mine)
        return theirs[: len(magic)] == magic

    def _proves(self, initiator: InitiatorT, role: bytes, said: bytes, proofs: bytes) -> bool:
        """Whether one of the proofs is good for the initiator's message; the first time, this proves the initiator."""
        initiator.transcript += said
        keys = initiator.keys or proof_keys(self._wire_up_keys(), self._token, self._address)
        key = proved_by(proofs, keys, role, initiator.transcript)
        if key is None:
            return False
        initiator.keys = (key,)
        if not initiator.proved:
            initiator.proved = True
            self._unproved.leave(initiator.origin)
        return True

    def _answer(self, initiator: InitiatorT, role: bytes, message: bytes) -> None:
        """Send a message with its proof to an initiator that has proved itself."""
        initiator.transcript += message
        initiator.connection.sendall(message + prove(initiator.keys[0], role, initiator.transcript))

    def _hang_up(self, initiator: InitiatorT) -> None:
        """End a handshake. Idempotent: a replaced initiator may have closed its end at the same time."""
        if self._initiators.get(initiator.connection.fileno()) is not initiator:
            return
        self._selector.unregister(initiator.connection)
        del self._initiators[initiator.connection.fileno()]
        if not initiator.proved:
            self._unproved.leave(initiator.origin)
        self._part(initiator)

    def _serve(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(self._patience()):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data is not None and not self._hear(key.data):
                    self._hang_up(key.data)
            now = time.monotonic()
            for initiator in list(self._initiators.values()):
                if not self._stays(initiator, now):
                    self._hang_up(initiator)
        for initiator in list(self._initiators.values()):
            self._hang_up(initiator)
        self._selector.close()
        for own in (self._listener, self._wake, self._waker, *self._others):
            own.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # it left before it was seen, or there is no file descriptor left
        origin = self._unproved.enter(connection)
        if origin is None:
            connection.close()
            return
        connection.setblocking(False)
        initiator = self._initiator(connection, origin, time.monotonic() + GREETING_S)
        self._initiators[connection.fileno()] = initiator
        self._selector.register(connection, selectors.EVENT_READ, initiator)

    def _hear(self, initiator: InitiatorT) -> bool:
        """Take what has arrived; returns whether the handshake continues."""
        try:
            received = initiator.connection.recv(initiator.wanted - len(initiator.received))
            if not received or initiator.silent:
                return False
            initiator.received += received
            if len(initiator.received) < initiator.wanted:
                return True
            message = bytes(initiator.received)
            initiator.received.clear()
            return self._understand(initiator, message)
        except (OSError, DataplaneError):
            return False


class UnprovedInitiators:
    """Counts the initiators that have not proved themselves yet, so that none of them can keep the others out."""

    def __init__(self) -> None:
        self._count = 0
        self._alike: Counter[Hashable] = Counter()

    def enter(self, connection: socket.socket) -> Hashable | None:
        """Count a connection in. Returns what to pass to `leave`; None if there are too many."""
        try:
            origin = _origin(connection)
        except OSError:
            return None  # it has left
        if self._count >= MOST_UNPROVED or self._alike[origin] >= MOST_ALIKE:
            return None
        self._count += 1
        self._alike[origin] += 1
        return origin

    def leave(self, origin: Hashable) -> None:
        """Count an initiator out: it has proved itself, or is gone."""
        self._count -= 1
        self._alike[origin] -= 1
        if not self._alike[origin]:
            del self._alike[origin]


def _origin(connection: socket.socket) -> Hashable:
    """Where a connection comes from: an address, or a user of this host."""
    if connection.family != socket.AF_UNIX:
        return str(connection.getpeername()[0])
    _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    # The many processes of one job must not keep each other out: each counts by itself, other users count together.
    return (uid, connection.fileno()) if uid == os.getuid() else uid
