"""`Collector`: reads what all processes of a job write, and hands it on, line by line."""

from __future__ import annotations

import array
import json
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

CHUNK_NBYTES = 64 << 10
MAX_LINE_NBYTES = 16 << 10
"""A longer line is cut into pieces of this size."""

IDLE_S = 0.5
"""What is written without a line's end is a line after this long: a prompt, or a bar of progress."""


@dataclass(slots=True, eq=False)
class Source:
    """One stream of one process.

    Attributes:
        fd: the reading end of its pipe.
        stream: 1 for the standard output, 2 for the standard error.
        name: of the process.
        pid: of the process.
        rest: what was read behind the last line's end.
        heard_s: when something was read last.
    """

    fd: int
    stream: int
    name: str
    pid: int
    rest: bytearray = field(default_factory=bytearray)
    heard_s: float = 0.0


class Collector:
    """A thread that reads all pipes, and never waits for anything else: who writes is not held up by who reads.

    Attributes:
        address: where processes hand in the reading ends of their pipes: a name of an abstract socket.
        is_over: whether nothing more will come.

    Args:
        take: told of every line, on the collector's thread; must not wait.
        tick: called on that thread after each round, and tells how many seconds it may take until the next; None: any.
    """

    def __init__(self, take: Callable[[Source, str], None], tick: Callable[[], float | None]) -> None:
        self.address = f"skipper-logs-{secrets.token_hex(16)}"
        self._take = take
        self._tick = tick
        self._selector = selectors.DefaultSelector()
        self._sources: set[Source] = set()
        self._idle = threading.Condition()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind("\0" + self.address)
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._wake, self._waker = os.pipe()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._closing = False
        self.is_over = False
        self._thread = threading.Thread(target=self._run, name="control-logs", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def speakers(self) -> int:
        """How many processes are listened to."""
        return len({source.pid for source in list(self._sources)})

    def wait_until_silent(self, timeout: float) -> bool:
        """Wait until every process has closed its streams; False where some have not in time."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._sources, timeout)

    def close(self) -> None:
        """Read what is there, and end. Those that still write get an error from now on."""
        self._closing = True
        os.write(self._waker, b"x")
        self._thread.join(5.0)

    def _run(self) -> None:
        while not self._closing:
            self._round(self._patience())
        self._round(0)  # the last words
        for source in list(self._sources):
            self._drop(source)
        self._selector.close()
        self._listener.close()
        os.close(self._wake)
        os.close(self._waker)
        self.is_over = True
        self._tick()

    def _patience(self) -> float | None:
        until = self._tick()
        if any(source.rest for source in self._sources):
            return IDLE_S / 2 if until is None else min(until, IDLE_S / 2)
        return until

    def _round(self, timeout: float | None) -> None:
        for key, _ in self._selector.select(timeout):
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.data, Source):
                self._read(key.data)
            else:
                os.read(self._wake, 100)
        now = time.monotonic()
        for source in self._sources:
            if source.rest and now - source.heard_s > IDLE_S:
                self._take(source, _text(source.rest))
                source.rest.clear()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # it has gone already
        with connection:
            connection.settimeout(0.5)
            try:
                if not _is_same_user(connection):
                    return
                words, ancillary, _, _ = connection.recvmsg(4096, socket.CMSG_SPACE(2 * array.array("i").itemsize))
                fds = _descriptors(ancillary)
                said = json.loads(words)
                name, pid = str(said["name"]), int(said["pid"])
                if len(fds) != 2:
                    raise ValueError("two pipes are needed")
                for stream, fd in zip((1, 2), fds, strict=True):
                    os.set_blocking(fd, False)
                    source = Source(fd, stream, name, pid)
                    self._sources.add(source)
                    self._selector.register(fd, selectors.EVENT_READ, source)
                connection.send(b"+")
            except (OSError, ValueError, KeyError, TypeError):
                return  # whatever that was, it was no process of the job

    def _read(self, source: Source) -> None:
        try:
            chunk = os.read(source.fd, CHUNK_NBYTES)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk:
            self._drop(source)
            return
        source.heard_s = time.monotonic()
        source.rest += chunk
        *lines, rest = source.rest.split(b"\n")
        for line in lines:
            for start in range(0, max(len(line), 1), MAX_LINE_NBYTES):
                self._take(source, _text(line[start : start + MAX_LINE_NBYTES]))
        while len(rest) > MAX_LINE_NBYTES:
            self._take(source, _text(rest[:MAX_LINE_NBYTES]))
            rest = rest[MAX_LINE_NBYTES:]
        source.rest = bytearray(rest)

    def _drop(self, source: Source) -> None:
        if source.rest:
            self._take(source, _text(source.rest))
        self._selector.unregister(source.fd)
        os.close(source.fd)
        with self._idle:
            self._sources.discard(source)
            self._idle.notify_all()


def _text(line: bytes | bytearray) -> str:
    return line.decode("utf-8", "replace").removesuffix("\r").rpartition("\r")[2]


def _is_same_user(connection: socket.socket) -> bool:
    _, uid, _ = struct.unpack("iii", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(uid == os.geteuid())


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return list(fds)
