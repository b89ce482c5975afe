"""`RecentResult`: something that is costly to find out, found out once for all who ask within a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class RecentResult(Generic[T]):
    """What a function returned last, or the exception that it raised. For any thread.

    Nothing is asked of the function while nobody asks for it. Whoever comes while it runs waits for that result.

    Args:
        find: the function.
        interval_s: how old its result may be before it is called again.

    Raises:
        ValueError: ``interval_s`` is not positive.
    """

    def __init__(self, find: Callable[[], T], interval_s: float) -> None:
        if not 0 < interval_s < float("inf"):
            raise ValueError(f"an interval is a positive number of seconds, not {interval_s}")
        self._find = find
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._taken_s = float("-inf")
        self._found: list[T] = []
        self._error: Exception | None = None

    def get(self) -> T:
        """The result, no older than the interval; raises what the function raised."""
        with self._lock:
            if time.monotonic() - self._taken_s >= self._interval_s:
                self._error = None
                try:
                    self._found = [self._find()]
                except Exception as error:  # noqa: BLE001  (it is the result of all who ask now)
                    self._error = error
                self._taken_s = time.monotonic()
            if self._error is not None:
                raise self._error.with_traceback(None)
            return self._found[0]
