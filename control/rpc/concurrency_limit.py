"""`ConcurrencyLimit`: a bound on calls at a time, first come first served, and on calls that wait."""

from __future__ import annotations

import threading
from collections import deque


class BusyError(Exception):
    """Too many calls wait already."""


class LateError(Exception):
    """The time of a call was up before its turn came."""


class ConcurrencyLimit:
    """Bounds how many calls an actor runs at a time; for any number of threads.

    Args:
        places: how many calls may run at a time.
        max_waiting: how many calls may wait for their turn.
    """

    def __init__(self, places: int, *, max_waiting: int) -> None:
        self._free = places
        self._max_waiting = max_waiting
        self._lock = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()

    def enter(self, timeout: float | None) -> None:
        """Wait in this thread until a call may run.

        Raises:
            BusyError: too many calls wait already.
            LateError: the turn did not come within ``timeout`` seconds.
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
        # The turn came at the very moment when the time was up: pass it on to the next call.
        self.leave()
        raise LateError

    def leave(self) -> None:
        """End a call, so that the next one may run."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._free += 1
