"""`Collector`: puts together the lines that all processes of a job write, on this host and on others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from skipper.control.observe.log_reader import LogReader, LogSource

MAX_LINE_NBYTES = 16 << 10
"""A longer line is cut into pieces of this size."""

IDLE_S = 0.5
"""What is written without a line's end is a line after this long: a prompt, or a bar of progress."""

LogChunk = tuple[int, str, int, bytes | None]
"""What a process of another host has written: which stream of it, its name, its pid there, and the bytes, of which
there may be none; None: the stream is over."""


class Collector(LogReader):
    """A thread that reads all pipes, and never waits for anything else: who writes is not held up by who reads.

    What is written on other hosts is read there and handed in by `feed`.

    Args:
        take: told of every line, on the collector's thread; must not wait.
        tick: called on that thread after each round, and tells how many seconds it may take until the next; None: any.
    """

    def __init__(self, take: Callable[[LogSource, str], None], tick: Callable[[], float | None]) -> None:
        super().__init__("control-logs")
        self._say = take
        self._tick = tick
        self._afar: dict[tuple[str, int, int], LogSource] = {}

    def speakers(self) -> int:
        """How many processes are listened to."""
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
        """Note that nothing more will come from a host, or from any but this; for any thread."""

        def drop_all() -> None:
            for key in [key for key in self._afar if host_id in (key[0], None)]:
                self._drop(self._afar.pop(key))

        self.run_soon(drop_all)

    # On the thread

    def _take_from_afar(self, host_id: str, host: str, chunk: LogChunk) -> None:
        stream, name, pid, content = chunk
        key = (host_id, pid, stream)
        if key not in self._afar:
            self._afar[key] = LogSource(-1, stream, name, pid, host)
            self._sources.add(self._afar[key])
        if content is None:
            self._drop(self._afar.pop(key))
        elif content:
            self._take(self._afar[key], content)

    def _take(self, source: LogSource, chunk: bytes) -> None:
        source.heard_s = time.monotonic()
        source.rest += chunk
        *lines, rest = source.rest.split(b"\n")
        for line in lines:
            for start in range(0, max(len(line), 1), MAX_LINE_NBYTES):
                self._say(source, _text(line[start : start + MAX_LINE_NBYTES]))
        while len(rest) > MAX_LINE_NBYTES:
            self._say(source, _text(rest[:MAX_LINE_NBYTES]))
            rest = rest[MAX_LINE_NBYTES:]
        source.rest = bytearray(rest)

    def _ended(self, source: LogSource) -> None:
        if source.rest:
            self._say(source, _text(source.rest))
            source.rest.clear()

    def _next_s(self) -> float | None:
        now = time.monotonic()
        for source in self._sources:
            if source.rest and now - source.heard_s > IDLE_S:
                self._say(source, _text(source.rest))
                source.rest.clear()
        until = self._tick()
        if any(source.rest for source in self._sources):
            return IDLE_S / 2 if until is None else min(until, IDLE_S / 2)
        return until


def _text(line: bytes | bytearray) -> str:
    return line.decode("utf-8", "replace").removesuffix("\r").rpartition("\r")[2]
