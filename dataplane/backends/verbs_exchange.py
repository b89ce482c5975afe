"""How two processes tell each other their queue pairs: a short, authenticated conversation over a stream socket.

The owner listens on a unix socket without a file (an abstract name, reachable on its host only), or on the TCP address
that `configure(verbs={"listen": ...})` names. All messages have a fixed size, nothing is unpickled.

    initiator  magic, its rails, nonce
    owner      magic, its rails, nonce
    initiator  endpoints, name, HMAC-SHA256(token, "initiator" + both first messages + endpoints + name)
    owner      endpoints, HMAC-SHA256(token, "owner" + both first messages + endpoints)

A rail is a port that a side uses; rails are numbered by their order on each side, told as a set of bits, and those that
both sides named are connected, each to the one of the same number. There is one endpoint for each of them.

A connection's name is the initiator's nonce. The name that the initiator sends is that of the connection which this one
replaces. The owner destroys its end of that before it answers: packets of a write that was given up, and that are still
on their way, can then not arrive after those of a later one.

The token is part of every handle of that owner, so whoever holds a handle can connect, and nobody else. The socket
stays open as long as the queue pairs: its end tells either side that the other one is gone.
"""

import hmac
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from dataplane.backends.verbs_device import ENDPOINT
from dataplane.errors import (
    BackendUnavailableError,
    DataplaneError,
    OwnerDiedError,
    TransferError,
    TransferTimeoutError,
)

TOKEN_BYTES = 16
NOBODY = bytes(16)
"""Name of a connection that does not exist."""

_HELLO = struct.Struct("<4sB16s")
_MAGIC = b"SKv3"
_DIGEST = 32
_GREETING_S = 5.0  # for the whole conversation, as the owner sees it
_STRANGERS = 64  # connections that have not proved themselves yet
_JOIN_S = 5.0


Endpoints = Mapping[int, bytes]
"""What one side must know of the other, by rail; see `verbs_device.ENDPOINT`."""


class Pairs(Protocol):
    """The owner's end of a connection; see `verbs_link.Pairs`."""

    @property
    def endpoints(self) -> Endpoints:
        """Its own."""

    def connect(self, theirs: Endpoints) -> None:
        """Connect to the initiator's, or expect it."""

    def close(self) -> None:
        """Destroy it."""


class Dialled(NamedTuple):
    """A connection as its initiator has it.

    Attributes:
        socket: To be kept as long as the queue pairs.
        endpoints: The owner's, on each rail that both sides have.
        name: For the connection that replaces it.
    """

    socket: socket.socket
    endpoints: dict[int, bytes]
    name: bytes


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


def dial(address: str, token: bytes, endpoints: Endpoints, deadline: float, *, replaces: bytes = NOBODY) -> Dialled:
    """Connect to an owner.

    Args:
        address: Where it listens.
        token: Proves that both belong together.
        endpoints: Of this side, on the rails that it would use.
        deadline: On CLOCK_MONOTONIC.
        replaces: Name of an earlier connection to this owner, over which nothing must arrive any more.

    Raises:
        OwnerDiedError: Nobody listens there any more.
        TransferError: The owner hangs up: it does not know the token, or has no queue pair left. Or both sides have no
            rail in common.
        TransferTimeoutError: The deadline (CLOCK_MONOTONIC) passed.
    """
    try:
        connection = _socket_for(address)
    except OSError as error:  # no file descriptor is left
        raise TransferError(f"no socket for a connection to {address}: {error}", status=error.errno) from error
    try:
        _set_timeout(connection, deadline)
        connection.connect(_target(address))
        name = secrets.token_bytes(len(NOBODY))
        mine = _HELLO.pack(_MAGIC, _bits(endpoints), name)
        connection.sendall(mine)
        theirs = _receive(connection, _HELLO.size, deadline)
        magic, bits, _ = _HELLO.unpack(theirs)
        if magic != _MAGIC:
            raise TransferError(f"who listens on {address} is no owner of buffers of this version of Skipper")
        used = tuple(rail for rail in endpoints if bits >> rail & 1)
        if not used:
            raise TransferError("the owner uses other RDMA ports, none of those that would be tried from here")
        own = b"".join(endpoints[rail] for rail in used) + replaces
        connection.sendall(own + _proof(token, b"initiator", mine + theirs, own))
        answer = _receive(connection, len(used) * ENDPOINT.size + _DIGEST, deadline)
        other, proof = answer[:-_DIGEST], answer[-_DIGEST:]
        if not hmac.compare_digest(proof, _proof(token, b"owner", mine + theirs, other)):
            raise TransferError(f"who listens on {address} is not the owner that the handle names")
    except TimeoutError:
        connection.close()
        raise TransferTimeoutError(f"the deadline passed before the owner had answered on {address}") from None
    except ConnectionRefusedError:
        connection.close()
        raise OwnerDiedError(f"nobody listens on {address} any more: the owner is gone") from None
    except OSError as error:
        connection.close()
        raise TransferError(f"no connection to the owner on {address}: {error}", status=error.errno) from error
    except BaseException:
        connection.close()
        raise
    connection.setblocking(False)
    return Dialled(connection, _split(other, used), name)


def hung_up(connection: socket.socket) -> bool:
    """Whether the other end of an idle connection is gone."""
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


@dataclass(slots=True)
class _Visitor:
    """A connection as the owner sees it; `wanted` bytes make the message that it owes, `name` is the one it has."""

    connection: socket.socket
    due: float
    wanted: int = _HELLO.size
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
        self._visitors: dict[int, _Visitor] = {}
        self._named: dict[bytes, _Visitor] = {}  # those that have proved themselves
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="dataplane-verbs-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hang up on everybody and end the thread. Idempotent."""
        if not self._closing:
            self._closing = True
            self._wake.send(b"x")
            self._thread.join(_JOIN_S)

    def _serve(self) -> None:
        while not self._closing:
            strangers = [visitor for visitor in self._visitors.values() if visitor.pairs is None]
            for key, _ in self._selector.select(_GREETING_S if strangers else None):
                if key.fileobj is self._listener:
                    self._welcome(len(strangers))
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

    def _welcome(self, strangers: int) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # it left before it was seen, or there is no file descriptor for it now
        if strangers >= _STRANGERS:
            connection.close()
            return
        connection.setblocking(False)
        visitor = _Visitor(connection, time.monotonic() + _GREETING_S)
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
        magic, bits, visitor.name = _HELLO.unpack(theirs)
        visitor.rails = tuple(rail for rail in self._rails if bits >> rail & 1)
        if magic != _MAGIC:
            return False
        mine = _HELLO.pack(_MAGIC, _bits(self._rails), secrets.token_bytes(16))
        visitor.greetings = theirs + mine
        visitor.wanted = len(visitor.rails) * ENDPOINT.size + len(NOBODY) + _DIGEST
        visitor.connection.sendall(mine)
        return bool(visitor.rails)

    def _meet(self, visitor: _Visitor, message: bytes) -> bool:
        theirs, proof = message[:-_DIGEST], message[-_DIGEST:]
        if not hmac.compare_digest(proof, _proof(self._token, b"initiator", visitor.greetings, theirs)):
            return False
        replaced = self._named.get(theirs[-len(NOBODY) :])
        if replaced is not None:
            self._see_off(replaced)
        visitor.wanted = 1
        self._named[visitor.name] = visitor
        visitor.pairs = pairs = self._make_pairs(visitor.rails)
        pairs.connect(_split(theirs, visitor.rails))
        mine = b"".join(pairs.endpoints[rail] for rail in visitor.rails)
        visitor.connection.sendall(mine + _proof(self._token, b"owner", visitor.greetings, mine))
        return True

    def _see_off(self, visitor: _Visitor) -> None:
        """Hang up on it. Idempotent: one that was replaced may have hung up itself at the same time."""
        if visitor.connection.fileno() < 0:
            return
        self._named.pop(visitor.name, None)
        self._selector.unregister(visitor.connection)
        del self._visitors[visitor.connection.fileno()]
        visitor.connection.close()
        if visitor.pairs is not None:
            visitor.pairs.close()


def _proof(token: bytes, role: bytes, greetings: bytes, endpoints: bytes) -> bytes:
    return hmac.digest(token, role + greetings + endpoints, "sha256")


def _bits(rails: Iterable[int]) -> int:
    return sum(1 << rail for rail in rails)


def _split(endpoints: bytes, rails: Iterable[int]) -> dict[int, bytes]:
    return {rail: endpoints[at * ENDPOINT.size :][: ENDPOINT.size] for at, rail in enumerate(rails)}


def _target(address: str) -> "str | tuple[str, int]":
    kind, _, where = address.partition(":")
    if kind == "unix":
        return f"\0{where}"
    host, _, port = where.rpartition(":")
    return host, int(port)


def _socket_for(address: str) -> socket.socket:
    target = _target(address)
    if isinstance(target, str):
        return socket.socket(socket.AF_UNIX)
    connection = socket.socket(socket.AF_INET6 if ":" in target[0] else socket.AF_INET)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _set_timeout(connection: socket.socket, deadline: float) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    connection.settimeout(left)


def _receive(connection: socket.socket, nbytes: int, deadline: float) -> bytes:
    received = b""
    while len(received) < nbytes:
        _set_timeout(connection, deadline)
        part = connection.recv(nbytes - len(received))
        if not part:
            raise TransferError("the owner hung up: it does not know the handle's token, or has no queue pair left")
        received += part
    return received
