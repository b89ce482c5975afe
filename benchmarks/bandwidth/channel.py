"""The side channel between client and server: small framed messages with deadlines; both ends prove a token.

Messages are bytes: JSON for requests and answers, `RDMABuffer.serialize()` for handles. Nothing that arrives is ever
unpickled. The payload of the benchmark itself does not pass through here.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import struct
import threading
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from types import TracebackType
from typing import Self

from skipper.benchmarks.errors import PeerError, PeerLostError, PeerTimeoutError, TokenRefusedError

__all__ = ["CONNECT_TIMEOUT_S", "MAX_MESSAGE", "MessageChannel", "accept", "connect", "handle_secret"]

CONNECT_TIMEOUT_S = 10.0
"""Limit in seconds for connecting to a server, and for proving the token in both directions."""

MAX_MESSAGE = 4 << 20
"""Longest message that is read, in bytes; a longer one ends the connection before it is stored."""


class MessageChannel:
    """Messages over one connected socket, which it owns.

    Every wait ends: with a message, with the end of the peer (`PeerLostError`), or with the deadline
    (`PeerTimeoutError`), also when the peer stops within a message. One thread at a time may use it.
    """

    def __init__(self, sock: socket.socket, *, peer: str, timeout: float) -> None:
        """Take over ``sock``; ``timeout`` seconds is the default of `receive` and the limit of a send."""
        self.peer = peer
        self.timeout = timeout
        sock.settimeout(None)
        _limit_blocking(sock, timeout)
        self._connection: Connection[bytes, bytes] = Connection(sock.detach())

    def send(self, message: bytes) -> None:
        """Send one message.

        Raises:
            PeerLostError: The peer is gone.
            PeerTimeoutError: The peer does not take the message off its socket.
        """
        with self._translated("does not read what it is sent"):
            self._connection.send_bytes(message)

    def receive(self, *, timeout: float | None = None) -> bytes:
        """Wait for one message, for ``timeout`` seconds at most (the channel's own when ``None``).

        Raises:
            PeerLostError: The peer is gone.
            PeerTimeoutError: It said nothing, or did not finish what it began to say.
        """
        limit = self.timeout if timeout is None else timeout
        with self._translated(f"said nothing for {limit:.3g} s"):
            if not self._connection.poll(limit):
                raise BlockingIOError
            return self._connection.recv_bytes(MAX_MESSAGE)

    def authenticate(self, token: bytes, *, serving: bool) -> None:
        """Prove to each other that both ends hold ``token``, which itself is not sent.

        Raises:
            TokenRefusedError: The tokens differ.
            PeerLostError: The peer ended the connection, or did not prove anything within
                `CONNECT_TIMEOUT_S`.
        """
        steps = (deliver_challenge, answer_challenge)
        with self._closed_after(CONNECT_TIMEOUT_S), self._translated("is slow to prove its token"):
            try:
                for step in steps if serving else reversed(steps):
                    step(self._connection, token)
            except AuthenticationError as error:
                raise TokenRefusedError(f"{self.peer} and this side hold different tokens") from error
            except AssertionError as error:
                raise PeerError(f"{self.peer} does not speak this protocol") from error

    def fileno(self) -> int:
        """The socket's descriptor, to hand the connection to another process."""
        return self._connection.fileno()

    def close(self) -> None:
        """Close the socket; safe to repeat."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextlib.contextmanager
    def _translated(self, slow: str) -> Iterator[None]:
        try:
            yield
        except (TokenRefusedError, PeerError):
            raise
        except BlockingIOError as error:
            raise PeerTimeoutError(f"{self.peer} {slow}") from error
        except (EOFError, OSError) as error:
            raise PeerLostError(f"the connection to {self.peer} ended: {str(error) or 'it was closed'}") from error

    @contextlib.contextmanager
    def _closed_after(self, seconds: float) -> Iterator[None]:
        """Shut the socket down when the block takes longer, also if the peer sends a little at a time."""
        with socket.socket(fileno=os.dup(self._connection.fileno())) as sock:
            timer = threading.Timer(seconds, _shut_down, (sock,))
            timer.daemon = True
            timer.start()
            try:
                yield
            finally:
                timer.cancel()
                timer.join()


def handle_secret(token: bytes) -> bytes:
    """The secret that proves handles on both sides: only a peer that holds the token can use them."""
    return hmac.digest(token, b"handles of the bandwidth benchmark", "sha256")


def connect(host: str, port: int, token: bytes, *, timeout: float) -> MessageChannel:
    """Reach the server at ``host``:``port`` and prove the token.

    Args:
        host: Name or address.
        port: TCP port.
        token: The shared secret.
        timeout: Default deadline of the channel, in seconds. Connecting has `CONNECT_TIMEOUT_S`.

    Raises:
        PeerLostError: Nobody listens there, or there is no such host.
        PeerTimeoutError: No answer.
        TokenRefusedError: The server holds another token.
    """
    where = f"the server at {host}:{port}"
    try:
        sock = socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S)
    except TimeoutError as error:
        raise PeerTimeoutError(f"{where} does not answer within {CONNECT_TIMEOUT_S:.3g} s") from error
    except OSError as error:
        raise PeerLostError(f"{where} cannot be reached: {error.strerror or error}") from error
    channel = MessageChannel(sock, peer=where, timeout=timeout)
    try:
        channel.authenticate(token, serving=False)
    except BaseException:
        channel.close()
        raise
    return channel


def accept(listener: socket.socket, token: bytes, *, timeout: float) -> MessageChannel:
    """Wait for the next client, without limit, and let it prove the token.

    Raises:
        PeerError: This client did not prove it; the listener continues.
    """
    sock, address = listener.accept()
    channel = MessageChannel(sock, peer=f"the client at {address[0]}:{address[1]}", timeout=timeout)
    try:
        channel.authenticate(token, serving=True)
    except BaseException:
        channel.close()
        raise
    return channel


def _limit_blocking(sock: socket.socket, seconds: float) -> None:
    """Let the kernel end any single read or write after ``seconds`` (socket(7), SO_RCVTIMEO)."""
    interval = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, interval)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, interval)
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
