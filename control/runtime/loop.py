"""The event loop of the process: one thread for all gRPC traffic, timers and deaths of children."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

from skipper.control.model.future import never_read_here
from skipper.control.runtime.procs import thread_limit

T = TypeVar("T")


class LoopThread:
    """A daemon thread that runs a uvloop event loop; gRPC needs one loop per process, so there is only one."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="control-loop", daemon=True)
        thread_limit.start(self._thread)

    def is_current(self) -> bool:
        """Whether this is the loop's own thread."""
        return threading.current_thread() is self._thread

    def run(self, coroutine: Coroutine[Any, Any, T], *, timeout: float) -> T:
        """Run a coroutine on the loop and wait for it in this thread.

        Raises:
            TimeoutError: it did not end in time; it has been cancelled.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(timeout)
        except TimeoutError:
            future.cancel()
            raise

    def close(self, *, timeout: float) -> None:
        """Stop the loop and its thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout)
        if not self._thread.is_alive():
            self.loop.close()

    def _run(self) -> None:
        never_read_here()
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
