"""`Executor`: the thread of an actor: plain for sync actors, with an event loop for async ones."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import enum
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import uvloop

from skipper.control.model.exception_text import describe
from skipper.control.model.failure import FailureKind
from skipper.control.model.future import Gate, reader, set_safe_point
from skipper.control.runtime import interruption
from skipper.control.runtime.actor_state import CALLERS_OF_USERS, ActorEndedError, ActorState
from skipper.control.runtime.context import current_context, name_actors_in_records
from skipper.control.runtime.messages import Mail
from skipper.control.runtime.procs import thread_limit

_STUCK_S = 0.05
"""If an event loop has work and has not run for this long, user code blocks it."""


class Executor(ABC):
    """Runs one actor, a message at a time, in the order in which they were submitted."""

    def __init__(self, actor: ActorState) -> None:
        self._actor = actor
        self._thread = self._make_thread()
        self._interrupting = threading.Lock()
        self._is_interrupted = False

    def _make_thread(self) -> threading.Thread:
        return threading.Thread(target=self._run_guarded, name=f"actor-{self._actor.name}", daemon=True)

    @property
    def thread_id(self) -> int | None:
        """The id of the actor's thread, as `threading.get_ident` returns it there."""
        return self._thread.ident

    @property
    def event_loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop of an async actor; None for a sync one."""
        return None

    def start(self) -> None:
        """Construct the actor and begin.

        Raises:
            ThreadLimitError: its thread cannot be started.
        """
        name_actors_in_records()
        thread_limit.start(self._thread)

    @abstractmethod
    def submit(self, mail: Mail) -> None:
        """Queue a message; from any thread. A message after the end is answered with an error."""

    @abstractmethod
    def depth(self) -> int:
        """How many messages wait for the actor; from any thread."""

    @abstractmethod
    def stop(self) -> None:
        """End the actor once it has handled what was submitted before; from any thread."""

    @abstractmethod
    def wake(self) -> None:
        """Make the actor handle its failures at the next safe point; from any thread."""

    @abstractmethod
    def unwind(self) -> None:
        """End what the actor waits for; from any thread, once the actor is cut off."""

    def interrupt(self) -> bool:
        """End user code that does not wait, by an exception; from any other thread.

        Returns:
            True if that is done, or not needed; False: try again in a moment.
        """
        with self._interrupting:
            thread_id = self._thread.ident
            if thread_id is None or not self._thread.is_alive():
                return True
            is_done = interruption.interrupt(thread_id, ActorEndedError, _CALLERS)
            self._is_interrupted = self._is_interrupted or is_done
            return is_done

    def stack(self) -> list[traceback.FrameSummary]:
        """Where the actor is in user code, the innermost call last; empty if it is in none. From any thread."""
        return [] if (thread_id := self._thread.ident) is None else interruption.stack_of(thread_id, _CALLERS)

    @abstractmethod
    def drain(self) -> None:
        """Answer every queued message: they came too late. From any thread, once the actor is cut off."""

    @abstractmethod
    def _run(self) -> None:
        """Run the actor from its construction to its end."""

    def _run_guarded(self) -> None:
        try:
            self._run()
        except ActorEndedError:
            self._actor.bury()  # the interruption came when nothing was left to end
        except BaseException as error:  # noqa: BLE001  (a defect of this package must not leave callers waiting)
            self._break(error)
            self._actor.bury()
        self._take_back_interruption()

    def _take_back_interruption(self) -> None:
        """Take back an exception that was meant for earlier work of this thread; on this thread."""
        while True:
            try:
                with self._interrupting:
                    if self._is_interrupted:
                        interruption.take_back()
                    self._is_interrupted = False
                return
            except ActorEndedError:
                continue  # the exception has come just now

    def _break(self, error: BaseException) -> None:
        message = f"{self._actor.label}: the runtime failed ({type(error).__name__}: {error})"
        self._actor.fail(FailureKind.EXCEPTION, message, describe(error))


class _Signal(enum.Enum):
    STOP = "stop"
    WAKE = "wake"


class SyncExecutor(Executor):
    """A plain thread, which can be interrupted while it waits for a future."""

    def __init__(self, actor: ActorState) -> None:
        super().__init__(actor)
        self._queue: deque[Mail | _Signal] = deque()
        self._idle = Gate()
        self._ended = False
        self._gate: Gate | None = None
        self._supervising = False

    def submit(self, mail: Mail) -> None:
        """Queue a message."""
        self._queue.append(mail)
        if not self._idle.is_open:  # as in `_put`, for each message
            self._idle.open()
        if self._ended or self._actor.is_cut_off:
            self.drain()

    def depth(self) -> int:
        """How many messages are queued."""
        return len(self._queue)

    def stop(self) -> None:
        """End behind what is queued."""
        self._put(_Signal.STOP)

    def unwind(self) -> None:
        """End what the actor waits for."""
        self.wake()

    def wake(self) -> None:
        """Attend to failures now, at the next safe point."""
        self._put(_Signal.WAKE)
        if (gate := self._gate) is not None:
            gate.open()

    def _put(self, item: Mail | _Signal) -> None:
        self._queue.append(item)
        if not self._idle.is_open:  # the thread closes it before it looks into the queue
            self._idle.open()

    def enter(self, gate: Gate) -> bool:
        """Wait at ``gate`` unless something must be handled first (see `future.SafePoint`)."""
        self._gate = gate
        return not self._has_to_unwind() and (self._supervising or self._ended or not self._actor.failures)

    def leave(self) -> None:
        """The wait is over."""
        self._gate = None

    def attend(self) -> None:
        """Supervise within a wait; unwinds what runs if the actor is cut off."""
        if self._actor.failures and not (self._supervising or self._ended):
            self._supervise()
        if self._has_to_unwind():
            raise ActorEndedError

    def _has_to_unwind(self) -> bool:
        return self._actor.is_cleanup_cut() if self._ended else self._actor.is_cut_off

    def _supervise(self) -> None:
        self._supervising = True
        try:
            drive(self._actor.supervise(is_async=False))
        finally:
            self._supervising = False

    def _run(self) -> None:
        actor = self._actor
        current_context.set(actor.context)
        set_safe_point(self)
        with contextlib.suppress(ActorEndedError):
            drive(actor.construct(is_async=False))
            while not actor.is_cut_off:
                item = self._next()
                if actor.failures:
                    self._supervise()
                if isinstance(item, Mail):
                    drive(actor.handle(item))
                elif item is _Signal.STOP:
                    break
        if actor.is_cut_off:
            self._take_back_interruption()
        self._ended = True
        self.drain()
        drive(actor.wind_up(is_async=False))
        set_safe_point(None)

    def _next(self) -> Mail | _Signal:
        """The first item in the queue; while the thread is idle, it reads what others send."""
        while True:
            try:
                return self._queue.popleft()
            except IndexError:
                if self._actor.is_cut_off:  # and another thread has emptied the queue
                    return _Signal.WAKE
            self._idle.wait(takes_all=True)

    def drain(self) -> None:
        """Answer what is queued."""
        while True:
            try:
                item = self._queue.popleft()
            except IndexError:
                return
            if isinstance(item, Mail):
                self._actor.answer_dead(item)


class AsyncExecutor(Executor):
    """A thread with its own event loop, which lives as long as the actor."""

    def __init__(self, actor: ActorState) -> None:
        super().__init__(actor)
        self._loop = self._make_loop()
        self._mails: deque[Mail] = deque()
        self._sleeps = False
        self._wakeup: asyncio.Future[None] | None = None
        self._stopped = False
        self._ended = False
        self._runner: asyncio.Task[None] | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._cleaner: asyncio.Task[None] | None = None
        self._is_asked = 0
        """How often the event loop has been asked to unwind what runs; the last time at `_asked_s`."""
        self._asked_s = 0.0
        self._has_heard = 0
        """How often it has done so: less often if a coroutine keeps it from running."""
        self._beside: dict[asyncio.Task[None], None] = {}

    def _make_loop(self) -> asyncio.AbstractEventLoop:
        return uvloop.new_event_loop()

    @property
    def event_loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop of this actor."""
        return self._loop

    def submit(self, mail: Mail) -> None:
        """Queue a message."""
        self._mails.append(mail)
        if self._ended or self._actor.is_cut_off:
            self.drain()
        elif self._sleeps:  # the runner raises this flag and then looks again: none is missed
            self._sleeps = False
            if threading.get_ident() == self.thread_id:
                self._wake()  # the actor's own event loop has read it
            else:
                self._call_soon(self._wake)

    def depth(self) -> int:
        """How many messages are queued."""
        return len(self._mails)

    def stop(self) -> None:
        """End behind what is queued."""
        self._stopped = True
        self._call_soon(self._wake)

    def wake(self) -> None:
        """Attend to failures now, at the next safe point."""
        self._call_soon(self._attend)

    def unwind(self) -> None:
        """Cancel what runs."""
        self._is_asked, self._asked_s = self._is_asked + 1, time.monotonic()
        self._call_soon(self._unwind)

    def interrupt(self) -> bool:
        """End code that keeps the event loop from running: the loop itself cancels coroutines."""
        if self._has_heard == self._is_asked:
            return True
        return time.monotonic() > self._asked_s + _STUCK_S and super().interrupt()

    def stack(self) -> list[traceback.FrameSummary]:
        """Where the actor is, or where its coroutines wait."""
        if blocking := super().stack():
            return blocking
        for task in (self._cleaner, *self._beside, self._runner):
            if task is not None and (waiting := interruption.stack_of_task(task, CALLERS_OF_USERS)):
                return waiting
        return []

    def _call_soon(self, callback: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            return  # the loop is closed: the actor has ended, and nothing is left to wake

    def _wake(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)

    def _attend(self) -> None:
        if not self._actor.is_cut_off and (self._supervisor is None or self._supervisor.done()):
            here = contextvars.copy_context()
            here.run(current_context.set, self._actor.context)
            self._supervisor = self._loop.create_task(self._actor.supervise(is_async=True), context=here)

    def _unwind(self) -> None:
        self._has_heard += 1
        tasks = [*self._beside, self._supervisor, self._cleaner if self._actor.is_cleanup_cut() else None]
        if not self._ended:
            tasks.append(self._runner)
        for task in tasks:
            if task is not None:
                task.cancel()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        finally:
            asyncio.set_event_loop(None)
            self._loop.close()

    async def _main(self) -> None:
        current_context.set(self._actor.context)
        self._runner = self._loop.create_task(self._handle_all())
        await asyncio.wait((self._runner,))
        error = None if self._runner.cancelled() else self._runner.exception()
        if error is not None and not isinstance(error, ActorEndedError):
            self._break(error)
        self._ended = True
        self.drain()
        await self._finish_beside()
        self._cleaner = self._loop.create_task(self._actor.wind_up(is_async=True))
        await asyncio.wait((self._cleaner,))
        self._actor.bury()  # has an effect only if the cleanup was interrupted after its last step
        await self._cancel_the_rest()
        await self._loop.shutdown_asyncgens()

    async def _handle_all(self) -> None:
        actor = self._actor
        await actor.construct(is_async=True)
        while not actor.is_cut_off:
            if self._mails:
                mail = self._mails.popleft()
                if actor.is_concurrent(mail):
                    await self._start_beside(mail)
                else:
                    await actor.handle(mail)
            elif self._stopped:
                return
            else:
                if (its_reader := reader()) is not None:
                    its_reader.read_in(self._loop, takes_all=True)
                self._wakeup = self._loop.create_future()
                self._sleeps = True
                if not (self._mails or self._stopped):
                    await self._wakeup
                self._sleeps = False

    async def _start_beside(self, mail: Mail) -> None:
        """Run a concurrent endpoint until it first waits."""
        task = self._loop.create_task(self._actor.handle_beside(mail))
        self._beside[task] = None
        task.add_done_callback(self._beside.pop)
        await asyncio.sleep(0)  # it starts before the message behind it

    async def _finish_beside(self) -> None:
        """Wait for concurrent endpoints to end; if the actor is cut off, cancel them."""
        await asyncio.gather(*self._beside, return_exceptions=True)

    async def _cancel_the_rest(self) -> None:
        rest = [task for task in asyncio.all_tasks(self._loop) if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    def drain(self) -> None:
        """Answer what is queued."""
        while self._mails:
            try:
                mail = self._mails.popleft()
            except IndexError:
                return  # another thread took the last one
            self._actor.answer_dead(mail)


NewExecutor = Callable[[ActorState], Executor]


class ExecutorChoice(Protocol):
    """Makes the executors of a process' actors."""

    def __call__(self, *, is_async: bool) -> NewExecutor:
        """The function that gets each actor and makes its executor; the actor's endpoints are ``async`` or not."""


def with_own_thread(*, is_async: bool) -> NewExecutor:
    """A function that makes an executor with a thread of its own."""
    return AsyncExecutor if is_async else SyncExecutor


_CALLERS = CALLERS_OF_USERS | {AsyncExecutor._run.__code__}  # its event loop runs the tasks that users make


def drive(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise RuntimeError("a sync actor's endpoint tried to await")
