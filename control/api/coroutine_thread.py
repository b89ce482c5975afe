"""`CoroutineThread`: runs coroutines for callers that wait for them in a thread of their own."""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from skipper.control.model import forked
from skipper.control.model.future import Promise
from skipper.control.runtime import current_runtime
from skipper.control.runtime.context import context, current_context
from skipper.control.runtime.procs import thread_limit

T = TypeVar("T")


def is_on_actors_loop() -> bool:
    """Whether this code runs on the event loop of an ``async`` actor, which must not be blocked."""
    if current_context.get() is None:
        return False
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class CoroutineThread:
    """A daemon thread with an event loop, started at its first use; one serves all threads of its process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pid = 0

    def is_current(self) -> bool:
        """Whether the calling code runs on the thread itself: if it waited for the thread, it would wait forever."""
        return threading.current_thread() is self._thread

    def run(self, make: Callable[[], Coroutine[Any, Any, T]], *, begins_job: bool = True) -> T:
        """Run a coroutine there and wait for its end here; it sees the context variables of this thread.

        While it waits, a sync actor handles failures of the meshes that it owns. If the wait is interrupted, for
        example by `KeyboardInterrupt`, the coroutine is cancelled.

        Args:
            make: Makes the coroutine; called in this thread. The coroutine sets its own time limit.
            begins_job: Whether this process starts a job if it is in none; if False, the coroutine may join one.

        Raises:
            ForkedProcessError: this process is a forked copy of one of a job.
            NoActorContextError: this thread belongs to no actor.
        """
        forked.check()
        if begins_job or current_runtime.is_running():  # in this thread: a script's job belongs to its main thread
            context()
        loop = self._started()
        coroutine, ended = make(), Promise[T]()
        here, tasks = contextvars.copy_context(), list[asyncio.Task[T]]()

        def begin() -> None:
            task = loop.create_task(coroutine, context=here)
            tasks.append(task)
            task.add_done_callback(lambda task: ended.settle_by(task.result))

        loop.call_soon_threadsafe(begin)
        try:
            return ended.get()
        except BaseException:
            if not ended.done():
                loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            raise

    def call_soon(self, function: Callable[[], object]) -> None:
        """Call a function there, soon, if the thread runs; with the context variables of this thread.

        A finaliser may call this: it takes no lock that the interrupted code may hold.
        """
        loop = self._loop
        if loop is not None and self._pid == os.getpid():
            loop.call_soon_threadsafe(function)

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None or self._pid != os.getpid():  # a forked copy has no threads
                loop = asyncio.new_event_loop()
                thread = threading.Thread(target=_serve, args=(loop,), name=self._name, daemon=True)
                thread_limit.start(thread)
                self._loop, self._thread, self._pid = loop, thread, os.getpid()
            return self._loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
