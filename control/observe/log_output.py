"""`OutputWriter`: writes lines to the script's standard output and error, which may be slow, or a terminal."""

from __future__ import annotations

import io
import os
import sys
import threading
import zlib
from collections import deque
from typing import TextIO

from skipper.control.observe import terminal_line
from skipper.control.observe.log_lines import Line, mesh_of

MAX_WAITING = 20_000
"""How many lines wait for a script whose output is slow; further lines are dropped, and counted."""
MAX_WAITING_CHARS = 8 << 20

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92)


class OutputWriter:
    """A thread that writes, started with the first line; its queue is bounded."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, str, str]] = deque()
        self._chars = 0
        self._changed = threading.Condition()
        self._writing = False
        self._closing = False
        self._has_thread = False

    def put(self, line: Line, *, prefixed: bool, even_if_full: bool = False) -> bool:
        """Take a line; False if it is dropped."""
        with self._changed:
            is_full = len(self._waiting) >= MAX_WAITING or self._chars >= MAX_WAITING_CHARS
            if is_full and not even_if_full:
                return False
            self._waiting.append((line.stream, line.prefix() if prefixed else "", line.text))
            self._chars += len(line.text)
            if not self._has_thread:
                self._has_thread = True
                threading.Thread(target=self._run, name="control-logs-writer", daemon=True).start()
            self._changed.notify_all()
            return True

    def flush(self, timeout: float) -> bool:
        """Wait until all is written, ``timeout`` seconds at most; False if that is not enough."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._waiting or self._writing), timeout)

    def close(self, timeout: float) -> None:
        """End once all is written, and wait for that, ``timeout`` seconds at most."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self.flush(timeout)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: bool(self._waiting) or self._closing)
                if not self._waiting:
                    return
                batch, self._waiting = list(self._waiting), deque()
                self._chars = 0
                self._writing = True
            try:
                with terminal_line.aside():
                    _write(batch)
            except (OSError, ValueError):  # nobody reads any more, or it has been closed: the lines are lost with it
                continue


def _write(batch: list[tuple[int, str, str]]) -> None:
    """Write with as few calls as the order between the two streams allows."""
    is_coloured = {1: wants_colours(1), 2: wants_colours(2)}
    stream, text = 1, ""
    for number, prefix, line in batch:
        if number != stream and text:
            _write_to(stream, text)
            text = ""
        stream = number
        text += f"{painted(prefix) if is_coloured[number] else f'[{prefix}] '}{line}\n" if prefix else f"{line}\n"
    _write_to(stream, text)


def _write_to(number: int, text: str) -> None:
    stream = sys.stdout if number == 1 else sys.stderr  # the present ones: a notebook or a test may replace them
    try:
        _put(stream, text)
    except UnicodeEncodeError:  # a terminal of another encoding: characters that it lacks are shown by their numbers
        encoding = getattr(stream, "encoding", None) or "ascii"
        _put(stream, text.encode(encoding, "backslashreplace").decode(encoding))


def _put(stream: TextIO, text: str) -> None:
    """Write whole lines, and not into the middle of one of the script: `print` writes a line's end by itself.

    The buffer of a stream that is flushed at each line end holds the beginning of a line. Our lines go around it. An
    unbuffered stream (``python -u``) holds nothing back, so that a line of ours may come in the middle of the script's.
    """
    if isinstance(stream, io.TextIOWrapper) and stream.line_buffering and not stream.write_through:
        stream.buffer.write(text.encode(stream.encoding, stream.errors or "strict"))
        stream.buffer.flush()
    else:
        stream.write(text)
        stream.flush()


def wants_colours(number: int) -> bool:
    """Whether a stream of the script is a terminal that shows colours, and nobody has asked for none (no-color.org)."""
    stream = sys.stdout if number == 1 else sys.stderr
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # replaced, or closed
        return False


def painted(prefix: str) -> str:
    """A prefix in a terminal, each mesh in a colour of its own."""
    colour = _COLOURS[zlib.crc32(mesh_of(prefix.partition(" x")[0]).encode()) % len(_COLOURS)]
    return f"\x1b[{colour}m[{prefix}]\x1b[0m "
