"""HTTP/2 as a stranger may speak it: frames by hand, so that no library keeps him from what is not allowed."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterable

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, END_HEADERS, ACK = 0x1, 0x4, 0x1

Pairs = Iterable[tuple[str, str | bytes]]


def dial(address: str) -> socket.socket:
    """A socket to gRPC's target: ``host:port`` or ``unix-abstract:NAME``."""
    if address.startswith("unix-abstract:"):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect("\0" + address.removeprefix("unix-abstract:"))
        return connection
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)))


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    """One frame."""
    return len(body).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + body


def _text(value: str | bytes) -> bytes:
    encoded = value.encode() if isinstance(value, str) else value
    length = len(encoded)
    if length < 127:
        return bytes((length,)) + encoded
    rest, prefix = length - 127, bytearray((127,))
    while rest >= 128:
        prefix.append(rest & 127 | 128)
        rest >>= 7
    return bytes(prefix) + bytes((rest,)) + encoded


def header_block(path: str, metadata: Pairs = ()) -> bytes:
    """The headers of a request of gRPC's, each as a literal that nobody has to remember."""
    pairs: list[tuple[str, str | bytes]] = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "localhost"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
        *metadata,
    ]
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in pairs)


class Stranger:
    """One connection, with which anything can be done; a context manager.

    Attributes:
        ended: the streams that the server has ended.
        is_closed: whether the server has hung up.
    """

    def __init__(self, address: str) -> None:
        self._socket = dial(address)
        self._received = b""
        self._next = 1
        self.ended: set[int] = set()
        self.is_closed = False
        self.send(PREFACE + frame(SETTINGS, 0, 0))

    def send(self, data: bytes) -> None:
        """Send bytes as they are; void once the server has hung up."""
        try:
            self._socket.settimeout(10.0)
            self._socket.sendall(data)
        except OSError:
            self.is_closed = True

    def open(self, path: str, metadata: Pairs = ()) -> int:
        """Begin a request, and return its stream."""
        stream, self._next = self._next, self._next + 2
        self.send(frame(HEADERS, END_HEADERS, stream, header_block(path, metadata)))
        return stream

    def say(self, stream: int, message: bytes, *, is_compressed: bool = False, is_last: bool = True) -> None:
        """Send a message of gRPC's on a stream."""
        whole = struct.pack(">BI", is_compressed, len(message)) + message
        pieces = [whole[start : start + 16384] for start in range(0, len(whole), 16384)]
        for piece in pieces[:-1]:
            self.send(frame(DATA, 0, stream, piece))
        self.send(frame(DATA, END_STREAM if is_last else 0, stream, pieces[-1]))

    def listen(self, seconds: float = 0.0) -> None:
        """Take what the server says, for so long, or until it hangs up."""
        end = time.monotonic() + seconds
        while not self.is_closed:
            self._socket.settimeout(max(end - time.monotonic(), 0.001))
            try:
                chunk = self._socket.recv(1 << 16)
            except TimeoutError:
                return
            except OSError:
                chunk = b""
            if not chunk:
                self.is_closed = True
            self._received += chunk
            self._take_frames()

    def _take_frames(self) -> None:
        while len(self._received) >= 9:
            nbytes = int.from_bytes(self._received[:3])
            if len(self._received) < 9 + nbytes:
                return
            kind, flags = self._received[3:5]
            stream, body = int.from_bytes(self._received[5:9]), self._received[9 : 9 + nbytes]
            self._received = self._received[9 + nbytes :]
            if kind in (SETTINGS, PING) and not flags & ACK:
                self.send(frame(kind, ACK, 0, body if kind == PING else b""))
            elif kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM):
                self.ended.add(stream)

    def close(self) -> None:
        """Hang up."""
        with contextlib.suppress(OSError):
            self._socket.close()

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
