"""The owner's side of the conversation that connects queue pairs; see `verbs_exchange` for what is said."""

import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from dataplane.backends.exchange import DIGEST_BYTES, GREETING_S, Strangers, prove, proves
from dataplane.backends.verbs_device import ENDPOINT
from dataplane.backends.verbs_exchange import HELLO, MAGIC, NOBODY, Endpoints, bits_of, by_rail
from dataplane.errors import DataplaneError

_JOIN_S = 5.0


class Pairs(Protocol):
    """The owner's end of a connection; see `verbs_rails.PassivePairs`."""

    @property
    def endpoints(self) -> Endpoints:
        """Its own."""

    def connect(self, theirs: Endpoints) -> None:
        """Connect to the initiator's, or expect it."""

    def close(self) -> None:
        """Destroy it."""


@dataclass(slots=True)
class _Visitor:
    """A connection as the owner sees it; `wanted` bytes make the message that it owes, `name` is the one it has."""

    connection: socket.socket
    origin: Hashable
    due: float
    proved: bool = False
    wanted: int = HELLO.size
    received: bytearray = field(default_factory=bytearray)
    greetings: bytes = b""
    name: bytes = NOBODY
    rails: tuple[int, ...] = ()
    pairs: Pairs | None = None


class Server:
    """The owner's side: one daemon thread that answers initiators and keeps their queue pairs while they live."""

    def __init__(
        self,
        listener: socket.socket,
        token: bytes,
        rails: Iterable[int],
        make_pairs: Callable[[tuple[int, ...]], Pairs],
    ) -> None:
        self._listener = listener
        self._token = token
        self._rails = tuple(rails)
        self._make_pairs = make_pairs
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._wake, waker = socket.socketpair()
        self._waker = waker
        self._selector.register(waker, selectors.EVENT_READ)
        self._strangers = Strangers()
        self._visitors: dict[int, _Visitor] = {}
        self._named: dict[bytes, _Visitor] = {}  # those that have proved themselves
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="dataplane-verbs-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hang up on everybody and end the thread. Idempotent."""
        if not self._closing:
            self._wake.send(b"x")  # first: the thread, which may be awake, closes the socket once it sees the flag
            self._closing = True
            self._thread.join(_JOIN_S)

    def _serve(self) -> None:
        while not self._closing:
            strangers = [visitor for visitor in self._visitors.values() if visitor.pairs is None]
            for key, _ in self._selector.select(GREETING_S if strangers else None):
                if key.fileobj is self._listener:
                    self._welcome()
                elif key.data is not None and not self._hear(key.data):
                    self._see_off(key.data)
            now = time.monotonic()
            for visitor in strangers:
                if visitor.pairs is None and now > visitor.due:
                    self._see_off(visitor)
        for visitor in list(self._visitors.values()):
            self._see_off(visitor)
        self._selector.close()
        for own in (self._listener, self._wake, self._waker):
            own.close()

    def _welcome(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # it left before it was seen, or there is no file descriptor for it now
        origin = self._strangers.enter(connection)
        if origin is None:
            connection.close()
            return
        connection.setblocking(False)
        visitor = _Visitor(connection, origin, time.monotonic() + GREETING_S)
        self._visitors[connection.fileno()] = visitor
        self._selector.register(connection, selectors.EVENT_READ, visitor)

    def _hear(self, visitor: _Visitor) -> bool:
        """Take what has arrived; whether the connection goes on."""
        try:
            received = visitor.connection.recv(visitor.wanted - len(visitor.received) or 1)
            if not received or visitor.pairs is not None:
                return False
            visitor.received += received
            if len(visitor.received) < visitor.wanted:
                return True
            message = bytes(visitor.received)
            visitor.received.clear()
            # A reply is smaller than any socket's buffer, so it never blocks.
            return self._meet(visitor, message) if visitor.greetings else self._greet(visitor, message)
        except (OSError, DataplaneError):
            return False

    def _greet(self, visitor: _Visitor, theirs: bytes) -> bool:
        magic, bits, visitor.name = HELLO.unpack(theirs)
        visitor.rails = tuple(rail for rail in self._rails if bits >> rail & 1)
        if magic != MAGIC:
            return False
        mine = HELLO.pack(MAGIC, bits_of(self._rails), secrets.token_bytes(16))
        visitor.greetings = theirs + mine
        visitor.wanted = len(visitor.rails) * ENDPOINT.size + len(NOBODY) + DIGEST_BYTES
        visitor.connection.sendall(mine)
        return bool(visitor.rails)

    def _meet(self, visitor: _Visitor, message: bytes) -> bool:
        theirs, proof = message[:-DIGEST_BYTES], message[-DIGEST_BYTES:]
        if not proves(proof, self._token, b"initiator", visitor.greetings, theirs):
            return False
        visitor.proved = True
        self._strangers.leave(visitor.origin)
        replaced = self._named.get(theirs[-len(NOBODY) :])
        if replaced is not None:
            self._see_off(replaced)
        visitor.wanted = 1
        self._named[visitor.name] = visitor
        visitor.pairs = pairs = self._make_pairs(visitor.rails)
        pairs.connect(by_rail(theirs, visitor.rails))
        mine = b"".join(pairs.endpoints[rail] for rail in visitor.rails)
        visitor.connection.sendall(mine + prove(self._token, b"owner", visitor.greetings, mine))
        return True

    def _see_off(self, visitor: _Visitor) -> None:
        """Hang up on it. Idempotent: one that was replaced may have hung up itself at the same time."""
        if visitor.connection.fileno() < 0:
            return
        self._named.pop(visitor.name, None)
        self._selector.unregister(visitor.connection)
        del self._visitors[visitor.connection.fileno()]
        if not visitor.proved:
            self._strangers.leave(visitor.origin)
        visitor.connection.close()
        if visitor.pairs is not None:
            visitor.pairs.close()
