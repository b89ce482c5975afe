"""A worker of UCX for what this process initiates, with a thread that drives what no other thread does."""

import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from skipper.dataplane.backends.own_sockets import SocketPlace

if TYPE_CHECKING:
    from skipper.dataplane.backends.ucx import _ucp

_IDLE_S = 3600.0
_JOIN_S = 5.0
_LOOK_S = 0.1  # between two looks at whether the owners of what is under way still live


class Driven(Protocol):
    """What the thread of a client worker drives."""

    batch: "_ucp.Batch"
    deadline: float

    def claim(self) -> bool:
        """Whether the caller may drive it: only one thread may."""

    def settle(self) -> None:
        """Called when the batch is over."""

    def look(self) -> None:
        """Called now and then before that, to end the batch if its owner is gone."""

    def expire(self) -> None:
        """Called once when the deadline has passed: make the batch end soon."""


class ClientWorker:
    """One worker. Its thread starts with the first batch that is handed to it. Thread-safe.

    Attributes:
        worker: UCX's own object.
        running: The result of a batch that is not over.
        sources: The addresses from which it connects over TCP.
    """

    def __init__(
        self, worker: "_ucp.UcpWorker", name: str, running: int, sources: tuple[SocketPlace, ...] = ()
    ) -> None:
        self.worker = worker
        self.running = running
        self.sources = sources
        self._condition = threading.Condition()
        self._inbox: list[Driven] = []
        self._closing = False
        self._retired = False
        self._users = 0
        self._name = name
        self._thread: threading.Thread | None = None

    def adopt(self, run: Driven) -> None:
        """Have this worker's thread drive a run to its end."""
        with self._condition:
            self._inbox.append(run)
            if self._thread is None:
                self._thread = threading.Thread(target=self._drive, name=self._name, daemon=True)
                self._thread.start()
            self._condition.notify()
        self.worker.wake()

    def join(self, user: object) -> Callable[[], object]:
        """Count a connection that uses it, until that is collected or calls what this returns."""
        with self._condition:
            self._users += 1
        leave = weakref.finalize(user, self._left)
        leave.atexit = False
        return leave

    def _left(self) -> None:
        with self._condition:
            self._users -= 1
            self._condition.notify()

    def retire(self) -> None:
        """Another one takes its place. The thread and the worker end once no connection uses them."""
        self.worker.retire()
        with self._condition:
            self._retired = True
            self._condition.notify()

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
                while not (self._inbox or live or self._closing or self._deserted):
                    self._condition.wait(_IDLE_S)
                if self._deserted and not (self._inbox or live):
                    self._thread = None
                    return
                arrived, self._inbox = self._inbox, []
            if self._closing:
                return
            live += [run for run in arrived if run.claim()]
            if live:
                nearest = min(run.deadline for run in live)
                self.worker.drive([run.batch for run in live], min(nearest, time.monotonic() + _LOOK_S))
                now = time.monotonic()
                live = [run for run in live if self._goes_on(run, now)]

    @property
    def _deserted(self) -> bool:
        return self._retired and not self._users

    def _goes_on(self, run: Driven, now: float) -> bool:
        if run.batch.result != self.running:
            run.settle()
            return False
        if now >= run.deadline:
            run.expire()
        else:
            run.look()
        return True
