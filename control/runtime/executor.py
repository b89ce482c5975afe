"""`Executor`: the thread of an actor, plain for sync actors, with an event loop for async ones."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import enum
import queue
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Coroutine
from typing import Any

import uvloop

from control.context import current_context
from control.exception_text import describe
from control.failure import FailureKind
from control.future import set_safe_point
from control.runtime import thread_limit
from control.runtime.cell import Cell, CellEndedError
from control.runtime.messages import Mail


class Executor(ABC):
    """Runs one cell, a message at a time, in the order in which they were submitted."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._thread = threading.Thread(target=self._run_guarded, name=f"actor-{cell.name}", daemon=True)

    @property
    def thread_id(self) -> int | None:
        """Of the actor's thread, as `threading.get_ident` says there."""
        return self._thread.ident

    @property
    def event_loop(self) -> asyncio.AbstractEventLoop | None:
        """That of an async actor."""
        return None

    def start(self) -> None:
        """Construct the actor and begin.

        Raises:
            ThreadLimitError: its thread cannot be started.
        """
        thread_limit.start(self._thread)

    @abstractmethod
    def submit(self, mail: Mail) -> None:
        """Queue a message; from any thread. One that comes after the end is answered as such."""

    @abstractmethod
    def depth(self) -> int:
        """How many messages wait for the actor; from any thread."""

    @abstractmethod
    def stop(self) -> None:
        """End the cell once what was submitted before has been handled; from any thread."""

    @abstractmethod
    def interrupt(self) -> None:
        """Have the cell attend to its failures, or end if it has failed itself; from any thread."""

    @abstractmethod
    def drain(self) -> None:
        """Answer every queued message as one that came too late; from any thread, once the cell has failed."""

    @abstractmethod
    def _run(self) -> None:
        """Run the cell from its construction to its end."""

    def _run_guarded(self) -> None:
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001  (a defect of this package must not leave callers waiting)
            self._break(error)
            self._cell.bury()

    def _break(self, error: BaseException) -> None:
        message = f"{self._cell.label}: the runtime failed ({type(error).__name__}: {error})"
        self._cell.fail(FailureKind.EXCEPTION, message, describe(error))


class _Signal(enum.Enum):
    STOP = "stop"
    WAKE = "wake"


class SyncExecutor(Executor):
    """A plain thread; waiting for a future is where it can be interrupted."""

    def __init__(self, cell: Cell) -> None:
        super().__init__(cell)
        self._queue: queue.SimpleQueue[Mail | _Signal] = queue.SimpleQueue()
        self._ended = False
        self._gate: threading.Lock | None = None
        self._supervising = False

    def submit(self, mail: Mail) -> None:
        """Queue a message."""
        self._queue.put(mail)
        if self._ended or self._cell.has_failed():
            self.drain()

    def depth(self) -> int:
        """How many messages are queued."""
        return self._queue.qsize()

    def stop(self) -> None:
        """End behind what is queued."""
        self._queue.put(_Signal.STOP)

    def interrupt(self) -> None:
        """Attend to failures now, at the next safe point."""
        self._queue.put(_Signal.WAKE)
        gate = self._gate
        if gate is not None:
            with contextlib.suppress(RuntimeError):  # the future opened it at the same moment
                gate.release()

    def enter(self, gate: threading.Lock) -> bool:
        """Wait at ``gate`` unless something is to be attended to (see `future.SafePoint`)."""
        self._gate = gate
        return self._supervising or not (self._cell.failures or self._cell.failure)

    def leave(self) -> None:
        """The wait is over."""
        self._gate = None

    def attend(self) -> None:
        """Supervise within a wait; unwinds the endpoint if the cell has failed."""
        cell = self._cell
        if self._supervising or not (cell.failures or cell.failure):
            return
        self._supervise()
        if cell.failure is not None and not self._ended:
            raise CellEndedError

    def _supervise(self) -> None:
        self._supervising = True
        try:
            _drive(self._cell.supervise(is_async=False))
        finally:
            self._supervising = False

    def _run(self) -> None:
        cell = self._cell
        current_context.set(cell.context)
        set_safe_point(self)
        _drive(cell.construct(is_async=False))
        while not cell.has_failed():
            item = self._queue.get()
            if cell.failures:
                self._supervise()
            if isinstance(item, Mail):
                _drive(cell.handle(item))
            elif item is _Signal.STOP:
                break
        self._ended = True
        self.drain()
        set_safe_point(None)
        _drive(cell.wind_up(is_async=False))

    def drain(self) -> None:
        """Answer what is queued."""
        while True:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return
            if isinstance(item, Mail):
                self._cell.answer_dead(item)


class AsyncExecutor(Executor):
    """A thread with an event loop of its own, which lives as long as the actor."""

    def __init__(self, cell: Cell) -> None:
        super().__init__(cell)
        self._loop = uvloop.new_event_loop()
        self._mails: deque[Mail] = deque()
        self._sleeps = False
        self._wakeup: asyncio.Future[None] | None = None
        self._stopped = False
        self._ended = False
        self._runner: asyncio.Task[None] | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._beside: set[asyncio.Task[None]] = set()

    @property
    def event_loop(self) -> asyncio.AbstractEventLoop | None:
        """Of this actor."""
        return self._loop

    def submit(self, mail: Mail) -> None:
        """Queue a message."""
        self._mails.append(mail)
        if self._ended or self._cell.has_failed():
            self.drain()
        elif self._sleeps:  # the runner raises this flag and then looks again: none is missed
            self._sleeps = False
            self._call_soon(self._wake)

    def depth(self) -> int:
        """How many messages are queued."""
        return len(self._mails)

    def stop(self) -> None:
        """End behind what is queued."""
        self._stopped = True
        self._call_soon(self._wake)

    def interrupt(self) -> None:
        """Attend to failures now, at the next safe point."""
        self._call_soon(self._attend)

    def _call_soon(self, callback: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            return  # the loop is closed: the actor has ended and there is nothing left to wake

    def _wake(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)

    def _attend(self) -> None:
        if self._cell.failure is not None:
            for task in self._beside:
                task.cancel()
            if self._runner is not None and not self._ended:
                self._runner.cancel()
        elif self._supervisor is None or self._supervisor.done():
            here = contextvars.copy_context()
            here.run(current_context.set, self._cell.context)
            self._supervisor = self._loop.create_task(self._cell.supervise(is_async=True), context=here)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        finally:
            asyncio.set_event_loop(None)
            self._loop.close()

    async def _main(self) -> None:
        current_context.set(self._cell.context)
        self._runner = self._loop.create_task(self._handle_all())
        await asyncio.wait((self._runner,))
        if not self._runner.cancelled() and (error := self._runner.exception()) is not None:
            self._break(error)
        self._ended = True
        self.drain()
        await self._finish_beside()
        await self._cell.wind_up(is_async=True)
        await self._cancel_the_rest()
        await self._loop.shutdown_asyncgens()

    async def _handle_all(self) -> None:
        cell = self._cell
        await cell.construct(is_async=True)
        while not cell.has_failed():
            if self._mails:
                mail = self._mails.popleft()
                if cell.is_concurrent(mail):
                    await self._start_beside(mail)
                else:
                    await cell.handle(mail)
            elif self._stopped:
                return
            else:
                self._wakeup = self._loop.create_future()
                self._sleeps = True
                if not (self._mails or self._stopped):
                    await self._wakeup
                self._sleeps = False

    async def _start_beside(self, mail: Mail) -> None:
        """Run a concurrent endpoint up to where it waits."""
        task = self._loop.create_task(self._cell.handle_beside(mail))
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)
        await asyncio.sleep(0)  # it starts before the message behind it

    async def _finish_beside(self) -> None:
        """Wait for concurrent endpoints to end; a failure of the cell cuts them short."""
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
            self._cell.answer_dead(mail)


def _drive(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise RuntimeError("a sync actor's endpoint tried to await")
