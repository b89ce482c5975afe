"""What may be sent a second time, and `RetryThread`, which sends it.

The threads that bring answers must not wait, so they leave to that thread what has to be sent because of an answer.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from skipper.control.model.endpoint_spec import EndpointSpec
from skipper.control.model.errors import SupervisionError

_IDLE_S = 5.0
"""After so long without anything to do the thread ends; the next job starts another one."""

_log = logging.getLogger("skipper.control")


class RetryThread:
    """Does jobs one after another, in their order, on a daemon thread that runs only while there are jobs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._is_running = False

    def submit(self, job: Callable[[], object]) -> None:
        """Have a job done soon; from any thread. The job may block, and those behind it wait with it."""
        with self._lock:
            self._jobs.put(job)
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="service-retry", daemon=True).start()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                job()
            except Exception:  # noqa: BLE001  (it has others to serve)
                _log.exception("a job of a service's retry thread raised")

    def _next(self) -> Callable[[], object] | None:
        try:
            return self._jobs.get(timeout=_IDLE_S)
        except queue.Empty:
            with self._lock:
                self._is_running = not self._jobs.empty()
                return self._jobs.get() if self._is_running else None


def may_retry(spec: EndpointSpec, error: SupervisionError, attempts: int, limit: int) -> bool:
    """Whether a request that ended in ``error`` may go to another replica.

    It may if it surely was not handled, however often that happens. It also may if its endpoint is `idempotent`, up to
    a limit: a request that kills the process that handles it would otherwise kill all replicas, one after another.

    Args:
        spec: the endpoint that it is for.
        error: what came in place of an answer.
        attempts: how often it was sent so far.
        limit: how often it may be sent again.
    """
    return error.is_unhandled or (spec.is_idempotent and attempts <= limit)
