"""The owner's side of handshakes: one thread that holds all of them, whatever is said in them."""

import os
import selectors
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from skipper.dataplane.backends.handshake import WireUpKeys, is_kindred, proof_keys, prove, proved_by
from skipper.dataplane.errors import DataplaneError

GREETING_S = 5.0
"""For the whole handshake."""
MOST_UNPROVED = 64
"""Connections to an owner that have not proved themselves yet."""
MOST_ALIKE = 16
"""Of them, connections that come from one address, or from one user of this host."""

_JOIN_S = 5.0
_CREDENTIALS = struct.Struct("3i")  # ucred of unix(7)


@dataclass(slots=True, eq=False)
class Initiator:
    """An initiator as the owner sees it.

    Attributes:
        connection: Its socket.
        origin: Where it comes from, see `UnprovedInitiators.enter`.
        due: Until when the handshake has to be over, on CLOCK_MONOTONIC.
        wanted: Bytes of the message that is due.
        proved: Whether it has proved itself.
        silent: Whether it has nothing more to say: whatever it sends ends it.
        received: What has come of the message that is due.
        transcript: All that both sides have said, without proofs.
        keys: Keys that its proofs may be made with; the one that it has used, once it has proved itself.
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
    """One daemon thread that holds the handshakes. All methods but `close` are called on that thread."""

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
            listener: Where initiators connect, of `handshake.bind`; kept.
            name: Of the thread.
            address: Of the listener as text, as it stands in handles.
            token: Of the handles.
            wire_up_keys: One of which an initiator must have.
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
        """Hang up on everybody and end the thread. Idempotent."""
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
        """Take a message; whether the handshake goes on. An answer must be smaller than any socket's buffer."""

    @abstractmethod
    def _stays(self, initiator: InitiatorT, now: float) -> bool:
        """Whether it may stay; asked after everything that happens and after `_patience`."""

    @abstractmethod
    def _patience(self) -> float | None:
        """After how many seconds to look at the initiators though nothing happens; None: never."""

    @abstractmethod
    def _part(self, initiator: InitiatorT) -> None:
        """Close its connection, and undo what was done for it. It is not among the initiators any more."""

    def _begin(self) -> None:
        self._thread.start()

    def _greet(self, initiator: InitiatorT, theirs: bytes, mine: bytes, magic: bytes) -> bool:
        """Answer a greeting; whether the initiator is of our version."""
        if not is_kindred(theirs[: len(magic)], magic):
            return False
        initiator.transcript = theirs + mine
        initiator.connection.sendall(mine)
        return theirs[: len(magic)] == magic

    def _proves(self, initiator: InitiatorT, role: bytes, said: bytes, proofs: bytes) -> bool:
        """Whether one of the proofs is good for what the initiator has said; from the first time on it is proved."""
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
        """End a handshake. Idempotent: one that was replaced may have hung up itself at the same time."""
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
            return  # it left before it was seen, or there is no file descriptor for it now
        origin = self._unproved.enter(connection)
        if origin is None:
            connection.close()
            return
        connection.setblocking(False)
        initiator = self._initiator(connection, origin, time.monotonic() + GREETING_S)
        self._initiators[connection.fileno()] = initiator
        self._selector.register(connection, selectors.EVENT_READ, initiator)

    def _hear(self, initiator: InitiatorT) -> bool:
        """Take what has arrived; whether the handshake goes on."""
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
    """Counts those that have not proved themselves yet, so that none of them keeps the others out."""

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
