"""Waits with a deadline: for any awaitable, and for an actor's answer, which may be one of the store's own errors.

Nearly all of them end long before the deadline, so one timer serves all waits of an event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Coroutine
from typing import NoReturn, TypeVar

from skipper.control import ActorError, Future
from skipper.control.model.bounds import check_seconds
from skipper.torchstore.errors import StoreError, StoreTimeoutError

T = TypeVar("T")


async def within(seconds: float, work: Awaitable[T]) -> T:
    """Wait for something with a time limit, at a fraction of the cost of `asyncio.timeout`.

    Raises:
        TimeoutError: The time is up; the work was cancelled.
        TypeError: The limit is not a number of seconds.
        ValueError: The limit is NaN.
    """
    try:
        seconds = check_seconds("timeout", seconds)
    except BaseException:
        if isinstance(work, Coroutine):
            work.close()
        raise
    loop = asyncio.get_running_loop()
    clock = _clocks.get(loop) or _clock_of(loop)
    task = asyncio.current_task(loop)
    assert task is not None  # this is a coroutine, and a loop runs it
    # As in `asyncio.timeout`, whose context manager costs several microseconds.
    limit = _Limit(task)
    cancelling = task.cancelling()
    clock.add(limit, loop.time() + seconds)
    try:
        return await work
    except asyncio.CancelledError as error:
        if limit.take_back() <= cancelling:
            raise TimeoutError from error
        raise
    finally:
        clock.remove(limit)
        limit.take_back()  # the work may have ended in the same iteration of the loop as its time


def check_timeout(seconds: object) -> None:
    """Check a user's timeout.

    Raises:
        TypeError: It is not a number of seconds.
        ValueError: It is not above 0, or NaN.
    """
    if check_seconds("timeout", seconds) <= 0:
        raise ValueError(f"timeout must be above 0 seconds, not {seconds!r}")


class _Limit:
    """A wait of a task."""

    __slots__ = ("has_expired", "task")

    def __init__(self, task: asyncio.Task[object]) -> None:
        self.task = task
        self.has_expired = False

    def expire(self) -> None:
        """Cancel what the task waits for."""
        self.has_expired = True
        self.task.cancel()

    def take_back(self) -> float:
        """Undo the cancellation by `expire`. Returns how many others the task has, infinity if there was none."""
        if not self.has_expired:
            return math.inf
        self.has_expired = False
        return self.task.uncancel()


class _Clock:
    """The deadlines of one event loop. Its timer stays after its wait has ended: the next wait may need it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._call_at = loop.call_at
        self._time = loop.time
        self._ends: dict[_Limit, float] = {}
        self._rings_at = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def add(self, limit: _Limit, end: float) -> None:
        """Let ``limit`` expire at that time."""
        self._ends[limit] = end
        if end < self._rings_at:
            if self._timer is not None:
                self._timer.cancel()
            self._set(end)

    def remove(self, limit: _Limit) -> None:
        """Remove a limit whose wait has ended."""
        self._ends.pop(limit, None)

    def _set(self, at: float) -> None:
        self._rings_at = at
        self._timer = self._call_at(at, self._ring)

    def _ring(self) -> None:
        now = self._time()
        for limit in [limit for limit, end in self._ends.items() if end <= now]:
            del self._ends[limit]
            limit.expire()
        self._rings_at, self._timer = math.inf, None
        if self._ends:
            self._set(min(self._ends.values()))


_clocks: dict[asyncio.AbstractEventLoop, _Clock] = {}


def _clock_of(loop: asyncio.AbstractEventLoop) -> _Clock:
    for closed in [other for other in list(_clocks) if other.is_closed()]:
        _clocks.pop(closed, None)
    return _clocks.setdefault(loop, _Clock(loop))


async def ask(call: Awaitable[T], timeout: float) -> T:
    """Wait for an actor's answer, and unwrap the store's own errors.

    Raises:
        StoreError: What the endpoint raised.
        StoreTimeoutError: No answer in time.
        SupervisionError: The actor is dead.
        ActorError: The endpoint failed otherwise.
    """
    try:
        return await within(timeout, call)
    except (TimeoutError, ActorError) as error:
        _raise_own(error, timeout)


def ask_blocking(call: Future[T], timeout: float) -> T:
    """`ask` for code without an event loop."""
    try:
        return call.get(timeout)
    except (TimeoutError, ActorError) as error:
        _raise_own(error, timeout)


def _raise_own(error: TimeoutError | ActorError, timeout: float) -> NoReturn:
    """Raise the store's own error, if this error is or contains one."""
    if isinstance(error, TimeoutError) and not isinstance(error, StoreError):
        raise StoreTimeoutError(f"the store did not answer within {timeout:g} s") from error
    if isinstance(error, ActorError) and isinstance(error.cause, StoreError):
        raise error.cause from error
    raise error
