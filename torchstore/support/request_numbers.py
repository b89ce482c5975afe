"""Numbers for what a client asks of its store's controller: it is done once, however often it has to be sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

RequestNumber = tuple[int, int]
"""The number of a request, or 0; and of the oldest one of the client for which it still waits."""

UNNUMBERED: RequestNumber = (0, 0)
"""It is sent once."""


class RequestNumbers:
    """The requests of one client that are under way. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._last = 0
        self._waiting: dict[int, None] = {}  # the oldest first

    @contextmanager
    def next(self) -> Iterator[RequestNumber]:
        """A request that is under way for as long as the block."""
        with self._lock:
            self._last += 1
            number = self._last
            self._waiting[number] = None
            request = (number, next(iter(self._waiting)))
        try:
            yield request
        finally:
            with self._lock:
                del self._waiting[number]
