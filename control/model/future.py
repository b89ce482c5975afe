"""`Future`: a result that is on its way; waited for in a thread by `get`, in any event loop by ``await``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Generator, Iterator
from functools import partial
from time import monotonic as _now
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

from skipper.control.model import forked
from skipper.control.model._future import (
    FutureState,
    Gate,
    call_by,
    error_of,
    is_opened,
    reader,
    set_reader,
    settle,
    value_of,
    when_settled,
)
from skipper.control.model.bounds import check_optional_seconds
from skipper.control.model.errors import DeadlineError
from skipper.control.model.exception_text import in_seconds

__all__ = [
    "Future",
    "Gate",
    "Listener",
    "Members",
    "Pending",
    "Promise",
    "Reader",
    "SafePoint",
    "both",
    "never_read_here",
    "nobody",
    "peek",
    "raising",
    "reader",
    "set_listener",
    "set_reader",
    "set_safe_point",
    "unheard",
    "unread_error",
]

T = TypeVar("T")

_log = logging.getLogger("skipper.control")


class Reader(Protocol):
    """Reads what others send, in the threads that wait for it (see `Gate`)."""

    def wait(self, gate: Gate, timeout_s: float, takes_all: bool) -> None:
        """Wait until the gate is opened or the time is over; this thread may read during that time.

        Args:
            gate: the gate; only this thread waits at it.
            timeout_s: seconds, -1 for no limit.
            takes_all: whether every message may be delivered here, since nothing interrupts this thread.
        """

    def nudge(self) -> None:
        """Make the thread that reads check whether its gate is open."""

    def read_in(self, loop: asyncio.AbstractEventLoop, takes_all: bool = False) -> None:
        """Make an event loop read whenever it runs nothing else. On its thread.

        Args:
            loop: the loop whose coroutines wait.
            takes_all: as for `wait`.
        """


class SafePoint(Protocol):
    """A thread that may be asked to do something else while it waits: to supervise, that is."""

    def enter(self, gate: Gate) -> bool:
        """Announce that the thread waits at ``gate``; False where something is already waiting to be done."""

    def leave(self) -> None:
        """Announce that the thread does not wait any more."""

    def attend(self) -> None:
        """Do what is waiting to be done, if anything is."""


class Pending(Protocol):
    """What the result of a future depends on, for the message of an error."""

    def describe(self) -> str:
        """What is missing, as far as it is known here."""

    def inquire(self) -> Callable[[], str]:
        """Begin to find out why; the returned function says what is known when it is called."""


INQUIRY_S = 1.0
"""At most this long before the end of a wait, the runtime asks why there is no result yet."""
_INQUIRY_SHARE = 0.1
"""The part of a wait that remains then."""
_SHORTEST_INQUIRED_S = 0.3
"""Shorter waits end without this question: they are likely to be frequent."""


class _Here(threading.local):
    safe_point: SafePoint | None = None
    keeps_to_itself = False
    loop_reads = True


_here = _Here()


def set_safe_point(safe_point: SafePoint | None) -> None:
    """Make ``safe_point`` the place for waits of the current thread."""
    _here.safe_point = safe_point


def never_read_here() -> None:
    """Keep the event loop of the current thread from reading: it has other things to do."""
    _here.loop_reads = False


Members = Callable[[], frozenset[str]]


def nobody() -> frozenset[str]:
    """The members of a future that waited for one answer, or for none."""
    return frozenset()


class Listener(Protocol):
    """Follows futures that end in errors."""

    def failed(self, future: Future[Any], members: Members) -> None:
        """Called when a future has ended in an error; in the thread that ends it.

        Args:
            future: the future; nobody has asked for its error yet.
            members: says ids of the actors and processes whose answers it waited for.
        """

    def heard(self, future: Future[Any], error: BaseException) -> None:
        """Called when somebody gets the error of a future; in the thread that gets it."""


_listener: Listener | None = None


def set_listener(listener: Listener | None) -> None:
    """Report all futures of this process that end in errors to ``listener``; None: to nobody."""
    global _listener
    _listener = listener


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """For code that waits and does not pass errors on: errors raised here count as unseen."""
    before, _here.keeps_to_itself = _here.keeps_to_itself, True
    try:
        yield
    finally:
        _here.keeps_to_itself = before


class Future(FutureState, Generic[T]):
    """The result of a call; it always ends, with a value or with an error.

    Several threads and event loops may wait for a future, and more than once. The result is unpickled in the thread
    that asks first.

    Attributes:
        pending: what the result depends on, for the message of an error; set by the code that settles the future.

    Example:
        ```python
        import asyncio

        from skipper.control import Actor, endpoint, this_proc

        class Echo(Actor):
            @endpoint
            def echo(self, word: str) -> str:
                return word

        echo = this_proc().spawn("echo", Echo)
        print(echo.echo.call_one("plain").get(timeout=10))

        async def main() -> None:
            print(await echo.echo.call_one("async"))

        asyncio.run(main())
        ```
    """

    __slots__ = ()

    def __repr__(self) -> str:
        """The text that appears if somebody prints the future in place of its result."""
        return f"<Future, {'has ended' if self.done() else 'not ended yet'}: get() or await gives its result>"

    @staticmethod
    def of(value: T) -> Future[T]:
        """A future that has already ended with ``value``."""
        promise: Promise[T] = Promise()
        promise.settle_by(lambda: value)
        return promise

    def get(self, timeout: float | None = None) -> T:
        """Wait in this thread for the result.

        In an actor with ``async`` endpoints use ``await`` instead: `get` keeps the actor's event loop from running.

        Args:
            timeout: seconds; None waits without limit, but at the latest until the actor's process is found dead.

        Raises:
            DeadlineError: (a `TimeoutError`) no result came in time; it may still come, and a later `get` returns it.
            ForkedProcessError: no result will come, because this process is a forked copy of the one that waits.
            ActorError: the endpoint raised.
            SupervisionError: the actor cannot answer any more.
        """
        if not self.done():
            self._wait(timeout)
        elif _here.safe_point is not None:
            _here.safe_point.attend()  # else a loop that only asks for ended futures would never supervise
        return self._result()

    def result(self, timeout: float | None = None) -> T:
        """The same as `get`, by the name that other futures of Python have for it."""
        return self.get(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end, as `get` does, and return the error that `get` raises, or None if there is a result.

        Raises:
            DeadlineError: (a `TimeoutError`) nothing arrived in time.
        """
        if not self.done():
            self._wait(timeout)
        try:
            self._result()
        except BaseException as error:  # noqa: BLE001  (asked for)
            return error
        return None

    def as_asyncio(self) -> asyncio.Future[T]:
        """A task of the running event loop that ends as this future does; cancelling the task does not cancel this.

        Raises:
            RuntimeError: no event loop runs in this thread.
        """
        return asyncio.get_running_loop().create_task(self._awaited())

    async def _awaited(self) -> T:
        return await self

    def add_done_callback(self, callback: Callable[[Future[T]], object]) -> None:
        """Call ``callback(self)`` when this ends, or now if it has ended; in the thread that ends it, so be quick."""
        when_settled(self, partial(callback, self))

    def __await__(self) -> Generator[Any, None, T]:
        if self.done():
            if error_of(self) is not None:
                yield  # else a coroutine that only awaits ended futures would block the event loop
        else:
            forked.check()
            loop = asyncio.get_running_loop()
            waiter = loop.create_future()
            thread_id = threading.get_ident()
            if _here.loop_reads and (its_reader := reader()) is not None:
                its_reader.read_in(loop)

            def wake() -> None:
                if not waiter.done():
                    waiter.set_result(None)

            def settled() -> None:
                if threading.get_ident() == thread_id:
                    wake()  # it has been read by the event loop itself
                elif not loop.is_closed():
                    loop.call_soon_threadsafe(wake)

            when_settled(self, settled)
            yield from waiter
        return self._result()

    def _wait(self, timeout: float | None) -> None:
        forked.check()
        timeout = check_optional_seconds("timeout", timeout)
        gate = Gate()
        when_settled(self, gate)
        deadline = _Deadline(timeout)
        pending, known = self.pending, None
        if timeout is not None and pending is not None and timeout >= _SHORTEST_INQUIRED_S:
            self._wait_until(gate, deadline.before(min(INQUIRY_S, timeout * _INQUIRY_SHARE)))
            known = None if self.done() else pending.inquire()
        self._wait_until(gate, deadline)
        if not self.done():
            raise DeadlineError(_words(timeout or 0, pending, known))

    def _wait_until(self, gate: Gate, deadline: _Deadline) -> None:
        if _here.safe_point is not None:
            self._wait_at(_here.safe_point, gate, deadline)
        elif not self.done():
            gate.wait(deadline.remaining())

    def _wait_at(self, point: SafePoint, gate: Gate, deadline: _Deadline) -> None:
        """Wait as a sync actor does: meanwhile it handles failures of the meshes that it owns."""
        while not self.done() and not deadline.passed():
            try:
                if point.enter(gate):
                    gate.wait(deadline.remaining())
            finally:
                point.leave()
            point.attend()

    def _result(self) -> T:
        """The result, for a caller that has asked for it."""
        if (error := error_of(self)) is None:
            return cast(T, value_of(self))
        if _listener is not None and not _here.keeps_to_itself:
            _listener.heard(self, error)
        raise error


class Promise(Future[T]):
    """The side that settles a future. The code that creates one gives it to others as a `Future`. For any thread.

    Only the first end counts; later ones change nothing.
    """

    __slots__ = ()

    def set_result(self, value: T) -> None:
        """End in a value."""
        self.settle_by(lambda: value)

    def set_exception(self, error: BaseException) -> None:
        """End in an error."""
        self.settle_by(raising(error))

    if TYPE_CHECKING:

        def settle_by(self, open_result: Callable[..., T], given: object = ...) -> None:
            """End with what ``open_result`` returns or raises; the first caller that asks for the result calls it.

            Args:
                open_result: called without arguments, or with ``given``; then a function that knows nothing of this.
                given: its argument.
            """

    else:
        settle_by = settle

    def fail_by(self, open_error: Callable[[], T], members: Members = nobody) -> None:
        """`settle_by` with a function that raises an error, which counts as unseen until somebody asks for it.

        Args:
            open_error: raises it.
            members: says ids of the actors and processes whose answers were waited for.
        """
        self.settle_by(open_error)
        if _listener is not None:
            _listener.failed(self, members)

    def hold(self, thing: object) -> None:
        """Keep an object alive until this ends."""
        when_settled(self, lambda: thing)


def raising(error: BaseException) -> Callable[[], Any]:
    """A function that raises an error, for `Promise.settle_by` and `Promise.fail_by`."""

    def raise_error() -> Any:
        raise error

    return raise_error


def peek(future: Future[T]) -> T:
    """The result of a future that has ended, for the runtime itself: an error still counts as unseen.

    Raises:
        BaseException: the error that the future has ended in.
    """
    if (error := error_of(future)) is not None:
        raise error
    return cast(T, value_of(future))


def unread_error(future: Future[Any]) -> BaseException | None:
    """The error that a future has ended in and that nobody has seen; None if there is none."""
    return None if is_opened(future) else error_of(future)


class _Deadline:
    def __init__(self, timeout: float | None) -> None:
        self._end = None if timeout is None else _now() + timeout

    def before(self, seconds: float) -> _Deadline:
        """The earlier of two deadlines."""
        return _Deadline(None if self._end is None else self._end - seconds - _now())

    def remaining(self) -> float:
        """Seconds as `Lock.acquire` takes them: -1 waits for ever."""
        return -1 if self._end is None else max(self._end - _now(), 0)

    def passed(self) -> bool:
        return self._end is not None and _now() >= self._end


def _words(timeout: float, pending: Pending | None, known: Callable[[], str] | None) -> str:
    head = f"no result within {in_seconds(timeout)}" if timeout > 0 else "no result yet"
    if pending is None:
        return head
    return f"{head}: {pending.describe() if known is None else known()}"


def _call(callback: Callable[[], object]) -> None:
    # A callback runs on any thread: what it does has nothing to do with the actor of that thread.
    point, _here.safe_point = _here.safe_point, None
    try:
        callback()
    except Exception:  # noqa: BLE001  (it runs on a thread that has others to serve)
        _log.exception("a callback of a future raised")
    finally:
        _here.safe_point = point


call_by(_call)


def both(one: Future[None], two: Future[None]) -> Future[None]:
    """A future that ends when two others have ended, with an error if one of them has one."""
    ended: Promise[None] = Promise()

    def settle() -> None:
        peek(one)
        peek(two)

    one.add_done_callback(lambda _: two.add_done_callback(lambda _: ended.settle_by(settle)))
    return ended
