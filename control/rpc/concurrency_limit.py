"""`ConcurrencyLimit`: so many at a time, in the order in which they came, and not too many of those who wait."""

from __future__ import annotations

import threading
from collections import deque


class BusyError(Exception):
    """Too many wait already."""


class LateError(Exception):
    """The time was up before it was one's turn."""


class ConcurrencyLimit:
    """Lets calls through to an actor; for any number of threads.

    Args:
        places: how many may be beyond it at a time.
        max_waiting: how many may wait for that.
    """

    def __init__(self, places: int, *, max_waiting: int) -> None:
        self._free = places
        self._max_waiting = max_waiting
        self._lock = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()

    def enter(self, timeout: float | None) -> None:
        """Wait for one's turn, in this thread.

        Raises:
            BusyError: there are too many who wait.
            LateError: it was not there within ``timeout`` seconds.
        """
        with self._lock:
            if self._free > 0:
                self._free -= 1
                return
            if len(self._waiting) >= self._max_waiting:
                raise BusyError
            gate = threading.Lock()
            gate.acquire()
            self._waiting.append(gate)
        if gate.acquire(timeout=-1 if timeout is None else timeout):
            return
        with self._lock:
            if gate in self._waiting:
                self._waiting.remove(gate)
                raise LateError
        # The turn came at the very moment when the time was up: it is the next one's.
        self.leave()
        raise LateError

    def leave(self) -> None:
        """Make room for the next one."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._free += 1
