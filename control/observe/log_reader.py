"""`LogReader`: reads the pipes that processes of its host write to; `Collector`: makes lines from all hosts' output."""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import json
import os
import secrets
import selectors
import socket
import struct
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from skipper.control.observe.log_lines import BURST_S, LineBudget, LineSplitter

CHUNK_NBYTES = 64 << 10

_MAX_WORDS_NBYTES = 4096
_BACKLOG = 128
_BETWEEN = "\x1f"


@dataclass(slots=True, eq=False)
class LogSource:
    """One stream of one process.

    Attributes:
        fd: the reading end of its pipe; -1 if that is on another host.
        stream: 1 for the standard output, 2 for the standard error.
        name: name of the process.
        pid: process id, on its host.
        host: address by which its host was attached; empty for this host.
        actors: the meshes of its actors, as far as it has reported them.
        lines: makes lines from its output.
        budget: how much of them may be shown.
    """

    fd: int
    stream: int
    name: str
    pid: int
    host: str = ""
    actors: tuple[str, ...] = ()
    lines: LineSplitter = field(default_factory=LineSplitter)
    budget: LineBudget = field(default_factory=lambda: LineBudget(BURST_S))

    def words(self) -> str:
        """Name and actors, as another host sends them."""
        return _BETWEEN.join((self.name, *self.actors)) if self.actors else self.name


class LogReader:
    """A thread that reads all pipes. The methods that subclasses override run on it, and must not wait.

    Attributes:
        address: the name of the abstract socket where processes hand in the reading ends of their pipes.
        is_over: whether nothing more will come.
    """

    def __init__(self, thread_name: str) -> None:
        self.address = f"skipper-logs-{secrets.token_hex(16)}"
        self.is_over = False
        self._selector = selectors.DefaultSelector()
        self._pipes = selectors.DefaultSelector()
        """The pipes, as one entry of the outer selector, so that all of them can be ignored for a while."""
        self._is_reading = True
        self._sources: set[LogSource] = set()
        self._idle = threading.Condition()
        self._soon: deque[Callable[[], None]] = deque()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind("\0" + self.address)
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._wake, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        self._waking = threading.Lock()
        for watched in (self._listener, self._wake, self._pipes):
            self._selector.register(watched, selectors.EVENT_READ)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=thread_name, daemon=True)

    # To be overridden

    def _opened(self, source: LogSource) -> None:
        """A new stream."""

    def _take(self, source: LogSource, chunk: bytes) -> None:
        """A chunk was read."""
        raise NotImplementedError

    def _ended(self, source: LogSource) -> None:
        """A stream has ended."""
        raise NotImplementedError

    def _next_s(self) -> float | None:
        """Called after each round and when all is over; returns how many seconds the next round may take at most."""
        return None

    def _has_room(self) -> bool:
        """Whether to read pipes now."""
        return True

    # For any thread

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def run_soon(self, act: Callable[[], None]) -> bool:
        """Run something on the thread; returns False, and does not run it, once the thread has ended."""
        with self._waking:
            if not self.is_over:
                self._soon.append(act)
                self._nudge()
            return not self.is_over

    def wait_until_silent(self, timeout: float) -> bool:
        """Wait until every process has closed its streams; False if some have not done so in time."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._sources, timeout)

    def close(self) -> None:
        """Read what has been written, and end. Processes that write afterwards get an error."""
        self._closing = True
        self.run_soon(lambda: None)
        self._thread.join(5.0)

    def _nudge(self) -> None:
        try:
            os.write(self._waker, b"x")
        except BlockingIOError:
            return  # it is about to wake up anyway

    # On the thread

    def _run(self) -> None:
        while not self._closing:
            self._round(self._next_s())
        self._round(0)  # what was written last
        for source in list(self._sources):
            self._drop(source)
        with self._waking:
            self.is_over = True
            self._selector.close()
            self._pipes.close()
            self._listener.close()
            for fd in (self._wake, self._waker, self._spare):
                os.close(fd)
        while self._soon:
            self._soon.popleft()()
        self._next_s()

    def _round(self, timeout: float | None) -> bool:
        """One round of the loop; returns whether something was read."""
        has_room = self._has_room()
        if has_room != self._is_reading:
            self._is_reading = has_room
            if has_room:
                self._selector.register(self._pipes, selectors.EVENT_READ)
            else:
                self._selector.unregister(self._pipes)
        ready: list[LogSource] = []
        for key, _ in self._selector.select(timeout):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._pipes:
                ready = [pipe.data for pipe, _ in self._pipes.select(0)]
            else:
                os.read(self._wake, 4096)
        while self._soon:
            self._soon.popleft()()
        for source in ready:
            self._read(source)
        return bool(ready)

    def _accept(self) -> None:
        """Accept all that wait: what a process reports about itself applies to its later output."""
        for _ in range(_BACKLOG):
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._turn_away()
                return  # no more are waiting, or the one that waited has gone
            with connection:
                self._meet(connection)

    def _turn_away(self) -> None:
        """No descriptors are left: close the connection of one that waits; its output is not redirected."""
        os.close(self._spare)
        with contextlib.suppress(OSError):
            self._listener.accept()[0].close()
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _meet(self, connection: socket.socket) -> None:
        connection.settimeout(0.5)
        fds: list[int] = []
        try:
            if not _is_same_user(connection):
                return
            space = socket.CMSG_SPACE(2 * array.array("i").itemsize)
            words, ancillary, _, _ = connection.recvmsg(_MAX_WORDS_NBYTES, space, socket.MSG_CMSG_CLOEXEC)
            fds = _descriptors(ancillary)
            said = json.loads(words)
            pid, actors = int(said["pid"]), tuple(map(str, said.get("actors", ())))
            if not fds:
                self._hear_of_actors(pid, actors)
                return
            name = str(said["name"])
            if len(fds) != 2:
                raise ValueError("two pipes are needed")
            for stream in (1, 2):
                os.set_blocking(fds[0], False)
                source = LogSource(fds.pop(0), stream, name, pid, actors=actors)
                self._sources.add(source)
                self._pipes.register(source.fd, selectors.EVENT_READ, source)
                self._opened(source)
            connection.send(b"+")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            return  # it was not a process of the job
        finally:
            for fd in fds:
                os.close(fd)

    def _hear_of_actors(self, pid: int, actors: tuple[str, ...]) -> None:
        for source in self._sources:
            if source.pid == pid and source.fd >= 0:
                source.actors = actors

    def _read(self, source: LogSource) -> None:
        try:
            chunk = os.read(source.fd, CHUNK_NBYTES)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if chunk:
            self._take(source, chunk)
        else:
            self._drop(source)

    def _drop(self, source: LogSource) -> None:
        self._ended(source)
        if source.fd >= 0:
            self._pipes.unregister(source.fd)
            os.close(source.fd)
        with self._idle:
            self._sources.discard(source)
            self._idle.notify_all()


def _has_more(source: LogSource) -> bool:
    """Whether something waits in the pipe of a process of this host."""
    if source.fd < 0:
        return False
    return any(fcntl.ioctl(source.fd, termios.FIONREAD, bytes(array.array("i").itemsize)))


def _is_same_user(connection: socket.socket) -> bool:
    _, uid, _ = struct.unpack("iii", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(uid == os.geteuid())


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return list(fds)


LogChunk = tuple[int, str, int, bytes | None]
"""Output of a process of another host: the stream, its `LogSource.words`, its pid there, and the bytes, which may be
empty; None: the stream has ended."""


class Collector(LogReader):
    """Splits all output into lines, and never waits for anything else: a slow reader does not hold up the writers.

    What is written on other hosts is read there and handed in by `feed`.

    Args:
        take: called with every line, on this thread; must not wait.
        tick: called on this thread after each round; returns how many seconds the next may take, or None for any.
        keep: called with every chunk, as it was written.
        admit: called with how many lines come from a process; returns how many of them `take` is to have.
    """

    def __init__(
        self,
        take: Callable[[LogSource, str], None],
        tick: Callable[[], float | None],
        keep: Callable[[LogSource, bytes], None] = lambda _, __: None,
        admit: Callable[[LogSource, int], int] = lambda _, count: count,
    ) -> None:
        super().__init__("control-logs")
        self._say = take
        self._tick = tick
        self._keep = keep
        self._admit = admit
        self._afar: dict[tuple[str, int, int], LogSource] = {}
        self._unfinished: set[LogSource] = set()

    def speakers(self) -> int:
        """How many processes write to this collector."""
        return len({(source.host, source.pid) for source in list(self._sources)})

    def feed(self, host_id: str, host: str, chunks: Sequence[LogChunk], done: Callable[[], None]) -> None:
        """Take what processes of another host have written, and call ``done`` once that is done; for any thread."""

        def take_all() -> None:
            for chunk in chunks:
                self._take_from_afar(host_id, host, chunk)
            done()

        if not self.run_soon(take_all):
            done()

    def lose(self, host_id: str | None = None) -> None:
        """Note that nothing more will come from a host, or from any other host than this one; for any thread."""

        def drop_all() -> None:
            for key in [key for key in self._afar if host_id in (key[0], None)]:
                self._drop(self._afar.pop(key))

        self.run_soon(drop_all)

    # On the thread

    def _take_from_afar(self, host_id: str, host: str, chunk: LogChunk) -> None:
        stream, words, pid, content = chunk
        key = (host_id, pid, stream)
        name, *actors = words.split(_BETWEEN)
        if key not in self._afar:
            self._afar[key] = LogSource(-1, stream, name, pid, host)
            self._sources.add(self._afar[key])
        self._afar[key].actors = tuple(actors)
        if content is None:
            self._drop(self._afar.pop(key))
        elif content:
            self._take(self._afar[key], content)

    def _take(self, source: LogSource, chunk: bytes) -> None:
        self._keep(source, chunk)
        count = chunk.count(b"\n")
        room = self._admit(source, count) if count else 0
        for text in source.lines.feed(chunk, time.monotonic(), room):
            self._say(source, text)
        if source.lines.due_s() < float("inf"):
            self._unfinished.add(source)

    def _ended(self, source: LogSource) -> None:
        if (text := source.lines.end()) is not None:
            self._say(source, text)
        self._unfinished.discard(source)

    def _next_s(self) -> float | None:
        now, waits = time.monotonic(), []
        for source in list(self._unfinished):
            if source.lines.due_s() <= now and _has_more(source):
                continue  # only this thread is late, and reads the line end in the next round
            if (text := source.lines.overdue(now)) is not None:
                self._say(source, text)
            if (due := source.lines.due_s()) < float("inf"):
                waits.append(due - now)
            else:
                self._unfinished.discard(source)
        until = self._tick()
        waits += [until] if until is not None else []
        return max(min(waits), 0.001) if waits else None
