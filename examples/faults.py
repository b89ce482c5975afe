"""The end of a script whose processes fail: at once, and with the first failure rather than what followed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from rich.markup import escape

from skipper import control
from skipper.control import ControlError, MeshFailure, SupervisionError

T = TypeVar("T")

SETTLE_S = 1.0
"""How long a failed call waits for the news of a death behind it. Deaths are pushed, so milliseconds do."""


def _nothing() -> None:
    """What is left to give up before the work has begun and after it has ended."""


class FirstFault:
    """Takes the failures that nobody below the script handled, in place of the hook that ends the script.

    When a process of a mesh is killed, its peers fail as well: a collective breaks off, and that error may
    reach the script before the news of the death. The script ends either way; this says why.
    """

    def __init__(self) -> None:
        self._failure: MeshFailure | None = None
        self._known = threading.Event()
        self._lock = threading.Lock()
        self._give_up: Callable[[], object] = _nothing
        control.unhandled_fault_hook = self._take

    def _take(self, failure: MeshFailure) -> None:
        if not self._known.is_set():
            self._failure = failure
            self._known.set()
            with self._lock:
                self._give_up()

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Await ``work``, but only for as long as every process is well.

        A death ends the calls to the dead; ``work`` may be waiting for somebody else, who is still starting.

        Raises:
            SupervisionError: A process or an actor failed; ``work`` is cancelled.
        """
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
        self._give_up = lambda: loop.call_soon_threadsafe(task.cancel)
        if self._known.is_set():
            task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            if self._failure is None:
                raise  # somebody else cancelled: the user, by Ctrl-C
            raise SupervisionError(self._failure.message, self._failure) from None
        finally:
            # The news may come after the error that it explains: there is no loop to call into then.
            with self._lock:
                self._give_up = _nothing

    def explain(self, error: Exception) -> str:
        """What to tell the user about ``error``, as rich markup."""
        if isinstance(error, ControlError):
            self._known.wait(SETTLE_S)
        if self._failure is not None:
            return escape(f"SupervisionError: {self._failure.report()}")
        return escape(f"{type(error).__name__}: {error or 'a step did not end in time'}")
