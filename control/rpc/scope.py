"""What an actor's code can know about the call that it serves: the time left, and whether it was cancelled."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from skipper.control.model.bounds import check_optional_seconds


class Scope:
    """One call that is being served.

    Args:
        timeout: seconds from now, or None.
    """

    __slots__ = ("_cancelled", "_lock", "_then", "deadline")

    def __init__(self, timeout: float | None = None) -> None:
        self.deadline = None if timeout is None else time.monotonic() + timeout
        self._lock = threading.Lock()
        self._cancelled = False
        self._then: Callable[[], object] | None = None

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody waits for the result any more."""
        return self._cancelled

    def cancel(self) -> None:
        """Note that nobody waits for the result any more."""
        with self._lock:
            self._cancelled = True
            then = self._then
        if then is not None:
            then()

    def when_cancelled(self, then: Callable[[], object]) -> None:
        """Call ``then`` when the call is cancelled, or now if it has been."""
        with self._lock:
            self._then = then
            is_past = self._cancelled
        if is_past:
            then()

    def remaining_s(self) -> float | None:
        """Seconds until the deadline, 0 or more; None if there is none."""
        return None if self.deadline is None else max(self.deadline - time.monotonic(), 0.0)


_current: ContextVar[Scope | None] = ContextVar("call", default=None)


@contextlib.contextmanager
def serving(scope: Scope) -> Iterator[None]:
    """Make this the served call, in this thread or task, while the block runs."""
    token = _current.set(scope)
    try:
        yield
    finally:
        _current.reset(token)


def remaining_s() -> float | None:
    """Seconds that are left of the call that the running code serves; None if there is no limit, or no call.

    Calls that it makes through an `RpcClient` have at most this time. A thread that the code starts does not have this
    limit, unless it is started with `contextvars.copy_context().run`.
    """
    scope = _current.get()
    return None if scope is None else scope.remaining_s()


def is_cancelled() -> bool:
    """Whether the result of the running call is no longer needed: its operation was cancelled, or its time is up.

    Code that runs for long should check this from time to time. An ``async`` method is cancelled like other tasks.
    """
    scope = _current.get()
    return scope is not None and (scope.is_cancelled or scope.remaining_s() == 0)


def deadline_after(timeout: float | None) -> float | None:
    """The deadline of a call made now, as `time.monotonic` counts: its own, or that of the served call."""
    timeout = check_optional_seconds("timeout", timeout)
    left = remaining_s()
    if left is not None and (timeout is None or left < timeout):
        timeout = left
    return None if timeout is None else time.monotonic() + timeout
