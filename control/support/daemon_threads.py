"""`DaemonThreads`: an executor whose threads never hold up the end of the process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_Task = tuple[Future[Any], Callable[[], Any]]


class DaemonThreads(Executor):
    """Runs each submitted function in a thread: an idle one, or a new one while there are fewer than ``most``.

    The executors of the standard library wait for their threads at the end of the interpreter, and so for ever if
    a method of a user hangs.

    Args:
        most: how many threads there may be; further functions wait for one.
        name: name of the threads, for people.
    """

    def __init__(self, most: int, *, name: str) -> None:
        self._most = most
        self._name = name
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._count = 0
        self._idle = 0
        """Waiting threads, minus the tasks that are queued for them."""

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call a function in a thread."""
        future: Future[T] = Future()
        with self._lock:
            is_new = self._idle <= 0 and self._count < self._most
            if is_new:
                self._count += 1
            else:
                self._idle -= 1
        self._tasks.put((future, lambda: function(*args, **kwargs)))
        if is_new:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the threads end once nothing is left to do, without waiting for them."""
        with self._lock:
            count = self._count
        for _ in range(count):
            self._tasks.put(None)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, function = task
            if future.set_running_or_notify_cancel():
                try:
                    result = function()
                except BaseException as error:  # noqa: BLE001  (the holder of the future gets it)
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
            del task, future, function  # keep nothing alive while idle
            with self._lock:
                self._idle += 1
        with self._lock:
            self._count -= 1
