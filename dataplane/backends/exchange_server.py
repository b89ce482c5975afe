"""The owner's side of the conversations of `exchange`: who holds them, whatever is said in them."""

import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Generic, Protocol, TypeVar

from skipper.dataplane.backends.exchange import GREETING_S, Strangers
from skipper.dataplane.errors import DataplaneError

_JOIN_S = 5.0


class Visitor(Protocol):
    """A connection as the owner sees it.

    Attributes:
        connection: It.
        origin: Where it comes from, see `Strangers.enter`.
        due: Until when the conversation has to be over, on CLOCK_MONOTONIC.
        proved: Whether it has proved itself.
        received: What has come of the message that is due.
    """

    connection: socket.socket
    origin: Hashable
    due: float
    proved: bool
    received: bytearray

    @property
    def wanted(self) -> int:
        """How many bytes the message has that is due; 1 where there is none."""


V = TypeVar("V", bound=Visitor)


class ExchangeServer(ABC, Generic[V]):
    """One daemon thread that holds the conversations. What its methods do is done on that thread, `close` apart."""

    def __init__(self, door: socket.socket, name: str, others: Sequence[socket.socket] = ()) -> None:
        """To be begun with `_begin`.

        Args:
            door: Where visitors come, of `exchange.bind`; kept.
            name: Of the thread.
            others: Sockets that are closed with it.
        """
        self._door = door
        self._others = tuple(others)
        self._selector = selectors.DefaultSelector()
        self._selector.register(door, selectors.EVENT_READ)
        self._wake, self._waker = socket.socketpair()
        self._selector.register(self._waker, selectors.EVENT_READ)
        self._strangers = Strangers()
        self._visitors: dict[int, V] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def close(self) -> None:
        """Hang up on everybody and end the thread. Idempotent."""
        if not self._closing:
            self._wake.send(b"x")  # first: the thread, which may be awake, closes the socket once it sees the flag
            self._closing = True
            self._thread.join(_JOIN_S)

    @abstractmethod
    def _visitor(self, connection: socket.socket, origin: Hashable, due: float) -> V:
        """What stands for somebody who has come."""

    @abstractmethod
    def _is_silent(self, visitor: V) -> bool:
        """Whether it has nothing more to say: whatever comes of it ends it."""

    @abstractmethod
    def _understand(self, visitor: V, message: bytes) -> bool:
        """Take a message; whether the conversation goes on. An answer is smaller than any socket's buffer."""

    @abstractmethod
    def _stays(self, visitor: V, now: float) -> bool:
        """Whether it may stay; asked after everything that happens and after `_patience`."""

    @abstractmethod
    def _patience(self) -> float | None:
        """After how many seconds to look at the visitors though nothing happens; None: never."""

    @abstractmethod
    def _part(self, visitor: V) -> None:
        """Close its connection, and undo what was done for it. It is not among the visitors any more."""

    def _begin(self) -> None:
        self._thread.start()

    def _serve(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(self._patience()):
                if key.fileobj is self._door:
                    self._welcome()
                elif key.data is not None and not self._hear(key.data):
                    self._see_off(key.data)
            now = time.monotonic()
            for visitor in list(self._visitors.values()):
                if not self._stays(visitor, now):
                    self._see_off(visitor)
        for visitor in list(self._visitors.values()):
            self._see_off(visitor)
        self._selector.close()
        for own in (self._door, self._wake, self._waker, *self._others):
            own.close()

    def _welcome(self) -> None:
        try:
            connection, _ = self._door.accept()
        except OSError:
            return  # it left before it was seen, or there is no file descriptor for it now
        origin = self._strangers.enter(connection)
        if origin is None:
            connection.close()
            return
        connection.setblocking(False)
        visitor = self._visitor(connection, origin, time.monotonic() + GREETING_S)
        self._visitors[connection.fileno()] = visitor
        self._selector.register(connection, selectors.EVENT_READ, visitor)

    def _hear(self, visitor: V) -> bool:
        """Take what has arrived; whether the conversation goes on."""
        try:
            received = visitor.connection.recv(visitor.wanted - len(visitor.received))
            if not received or self._is_silent(visitor):
                return False
            visitor.received += received
            if len(visitor.received) < visitor.wanted:
                return True
            message = bytes(visitor.received)
            visitor.received.clear()
            return self._understand(visitor, message)
        except (OSError, DataplaneError):
            return False

    def _has_proved(self, visitor: V) -> None:
        """It is no stranger any more."""
        visitor.proved = True
        self._strangers.leave(visitor.origin)

    def _see_off(self, visitor: V) -> None:
        """Hang up on it. Idempotent: one that was replaced may have hung up itself at the same time."""
        if self._visitors.get(visitor.connection.fileno()) is not visitor:
            return
        self._selector.unregister(visitor.connection)
        del self._visitors[visitor.connection.fileno()]
        if not visitor.proved:
            self._strangers.leave(visitor.origin)
        self._part(visitor)
