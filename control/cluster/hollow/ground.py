"""`Ground`: the threads that the hollow processes of one process of the operating system share."""

from __future__ import annotations

import gc
import logging
import queue
import threading
from collections.abc import Callable
from typing import NoReturn

from skipper.control.model.errors import ControlError, HollowHostError
from skipper.control.model.future import reader, set_reader
from skipper.control.runtime import current_runtime
from skipper.control.runtime.loop import LoopThread
from skipper.control.runtime.shared_executor import ActorThread
from skipper.control.wire._poller import Poller
from skipper.control.wire.process_ref import ProcessRef
from skipper.control.wire.sockets import Sockets

_CLOSE_TIMEOUT_S = 5.0
_FROZEN_TOGETHER = 32
"""The most consecutive process starts before the present objects are frozen for the garbage collector."""

_log = logging.getLogger("skipper.control.cluster.hollow")


class Ground:
    """The threads: one for timers, one that reads the host's sockets and runs the actors, one that starts processes.

    Attributes:
        loop_thread: for timers, heartbeats and deaths.
        poller: reads the packet sockets.
        actors: runs the actors.
        living: the hollow processes that are not completely gone.
    """

    def __init__(self) -> None:
        self.loop_thread = LoopThread()
        self.poller = Poller("hollow-local")
        set_reader(self.poller)
        self.actors = ActorThread("hollow-actors")
        self.living: set[object] = set()
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hollow-births", daemon=True)
        self._thread.start()
        current_runtime.refuse_by(_refuse)

    def network_for(self, me: ProcessRef, secret: bytes) -> Sockets:
        """The sockets of one of the processes."""
        return Sockets(me, secret, self.loop_thread.loop, self.poller)

    def soon(self, call: Callable[[], object]) -> None:
        """Call a function that may wait for the loop, after earlier ones; from any thread."""
        self._jobs.put(call)

    def on_loop(self, call: Callable[..., object], *args: object) -> None:
        """Call a function on the loop thread; from any thread."""
        self.loop_thread.loop.call_soon_threadsafe(call, *args)

    def until_done_on_loop(self, call: Callable[..., object], *args: object) -> None:
        """The same, and return when it is done; from any thread but the loop's."""
        done = threading.Event()
        self.on_loop(call, *args)
        self.on_loop(done.set)
        done.wait()

    def close(self) -> None:
        """End the threads; every hollow process is gone."""
        self._jobs.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)
        self.actors.close(_CLOSE_TIMEOUT_S)
        if reader() is self.poller:
            set_reader(None)
        self.poller.close()
        self.loop_thread.close(timeout=_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        done = 0
        while (job := self._jobs.get()) is not None:
            done += 1
            try:
                job()
            except ControlError as error:
                _log.error("a hollow process could not be made: %s", error)
            if self._jobs.empty() or done % _FROZEN_TOGETHER == 0:
                gc.freeze()  # objects that live as long as the job are not scanned again and again


def _refuse() -> NoReturn:
    raise HollowHostError(
        "an actor of a hollow host answers calls; it calls nobody, spawns nothing and opens no ports, which takes a "
        "process of its own"
    )
