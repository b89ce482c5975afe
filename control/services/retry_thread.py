"""`Courier`: a thread that sends what comes up where nothing may wait: on the threads that bring answers and news."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

_IDLE_S = 5.0
"""After so long without anything to do the thread ends; the next job starts another one."""

_log = logging.getLogger("skipper.control")


class Courier:
    """Does jobs one after another, in their order, on a daemon thread that is there only while it is needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._is_running = False

    def submit(self, job: Callable[[], object]) -> None:
        """Have a job done soon; from any thread. It may wait, and those behind it wait with it."""
        with self._lock:
            self._jobs.put(job)
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="service-courier", daemon=True).start()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                job()
            except Exception:  # noqa: BLE001  (it has others to serve)
                _log.exception("a job of a service's courier raised")

    def _next(self) -> Callable[[], object] | None:
        try:
            return self._jobs.get(timeout=_IDLE_S)
        except queue.Empty:
            with self._lock:
                self._is_running = not self._jobs.empty()
                return self._jobs.get() if self._is_running else None
