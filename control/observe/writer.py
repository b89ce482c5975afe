"""`Writer`: what writes to the script's output, which may be slow, so that nobody else waits for it."""

from __future__ import annotations

import sys
import threading
from collections import deque

from skipper.control.observe.aggregate import Line

MAX_WAITING = 20_000
"""Lines that wait for a script whose output is slow; those beyond are dropped, and counted."""


class Writer:
    """A thread that writes to the script's output, which may be slow; what waits for it is bounded."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, str]] = deque()
        self._changed = threading.Condition()
        self._dropped = 0
        self._writing = False
        self._closing = False
        threading.Thread(target=self._run, name="control-logs-writer", daemon=True).start()

    def put(self, line: Line, prefix: str) -> bool:
        """Take a line; False where it is dropped."""
        with self._changed:
            if len(self._waiting) >= MAX_WAITING:
                self._dropped += 1
                return False
            self._waiting.append((line.stream, f"{prefix}{line.text}\n"))
            self._changed.notify_all()
            return True

    def flush(self, timeout: float) -> bool:
        """Wait until all is written, ``timeout`` seconds at most; False where it is not in time."""
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
                dropped, self._dropped = self._dropped, 0
                self._writing = True
            if dropped:
                batch.append((2, f"[logs] {dropped} lines dropped: this output is too slow\n"))
            try:
                _write(batch)
            except (OSError, ValueError):  # nobody reads any more, or it has been closed: the lines are lost with it
                continue


def _write(batch: list[tuple[int, str]]) -> None:
    """Write, as few times as keeps the order between the two streams."""
    stream, text = 1, ""
    for number, line in batch:
        if number != stream and text:
            _write_to(stream, text)
            text = ""
        stream = number
        text += line
    _write_to(stream, text)


def _write_to(number: int, text: str) -> None:
    stream = sys.stdout if number == 1 else sys.stderr  # those of now: a notebook, or a test, has put others there
    stream.write(text)
    stream.flush()
