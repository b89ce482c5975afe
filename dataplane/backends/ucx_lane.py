"""A worker of UCX for what this process initiates, with the thread that drives what nobody else does."""

import threading
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from dataplane.backends import _ucp

_IDLE_S = 3600.0
_JOIN_S = 5.0
_LOOK_S = 0.1  # between two looks at whether the owners of what is under way still live


class Driven(Protocol):
    """What a lane drives."""

    batch: "_ucp.Batch"
    deadline: float

    def claim(self) -> bool:
        """Whether the caller is the one that may drive it."""

    def settle(self) -> None:
        """Called when the batch is over."""

    def look(self) -> None:
        """Called now and then before that: see to the same where there is nobody any more to answer."""

    def expire(self) -> None:
        """Called once when the deadline has passed: see to it that the batch comes to an end soon."""


class Lane:
    """One worker. Its thread starts with the first batch that is handed to it; thread-safe."""

    def __init__(self, worker: "_ucp.Worker", name: str, running: int) -> None:
        self.worker = worker
        self.running = running
        self._condition = threading.Condition()
        self._inbox: list[Driven] = []
        self._closing = False
        self._name = name
        self._thread: threading.Thread | None = None

    def adopt(self, run: Driven) -> None:
        """Let the lane's thread drive a run to its end."""
        with self._condition:
            self._inbox.append(run)
            if self._thread is None:
                self._thread = threading.Thread(target=self._drive, name=self._name, daemon=True)
                self._thread.start()
            self._condition.notify()
        self.worker.wake()

    def close(self) -> None:
        """Stop the thread. Idempotent."""
        with self._condition:
            self._closing = True
            self._condition.notify()
            thread = self._thread
        self.worker.wake()
        if thread is not None:
            thread.join(_JOIN_S)

    def _drive(self) -> None:
        live: list[Driven] = []
        while True:
            with self._condition:
                while not (self._inbox or live or self._closing):
                    self._condition.wait(_IDLE_S)
                arrived, self._inbox = self._inbox, []
            if self._closing:
                return
            live += [run for run in arrived if run.claim()]
            if live:
                nearest = min(run.deadline for run in live)
                self.worker.drive([run.batch for run in live], min(nearest, time.monotonic() + _LOOK_S))
                now = time.monotonic()
                live = [run for run in live if self._goes_on(run, now)]

    def _goes_on(self, run: Driven, now: float) -> bool:
        if run.batch.result != self.running:
            run.settle()
            return False
        if now >= run.deadline:
            run.expire()
        else:
            run.look()
        return True
