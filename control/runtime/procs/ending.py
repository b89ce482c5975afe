"""`Ending`: how the runtime of a process ends, a script's or a child's."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from skipper.control.model.errors import ControlError
from skipper.control.model.future import Future, Promise
from skipper.control.runtime.messages import Mail
from skipper.control.runtime.requests import EXIT
from skipper.control.runtime.stops import HANDED_DOWN, UNWIND_S

if TYPE_CHECKING:
    from skipper.control.runtime.actor_table import ActorTable
    from skipper.control.runtime.cast.sender import CastSender
    from skipper.control.runtime.loop import LoopThread
    from skipper.control.runtime.ownership import Ownership
    from skipper.control.runtime.process_state import ProcessState
    from skipper.control.runtime.procs.children import Children
    from skipper.control.runtime.request_server import RequestServer
    from skipper.control.wire.bulk import Loans
    from skipper.control.wire.transport import Transport

CLOSE_TIMEOUT_S = 5.0
KILL_TIMEOUT_S = 5.0
_ACTORS = 0.7
"""The fraction of the time to end that the actors of a process get; the rest is for the later steps."""
_LEAVE = 0.85
"""The fraction of it after which a process ends even if it is busy."""


class Ending:
    """The end of one process' runtime.

    Args:
        leave: makes the main thread of a worker return, within so many seconds; None: nothing after the runtime could
            take long.
        end: the last step of a worker's end.

    Attributes:
        before: functions to call first when the script's job ends, or a process leaves the job that it has joined.
        settled: functions to call once the actors have ended, while there are links to other processes.
        after: functions to call last.
    """

    def __init__(
        self,
        state: ProcessState,
        loop_thread: LoopThread,
        transport: Transport,
        loans: Loans,
        actors: ActorTable,
        casts: CastSender,
        children: Children,
        owners: Ownership,
        requests: RequestServer,
        *,
        leave: Callable[[float], None] | None,
        end: Callable[[], object],
    ) -> None:
        self.before: list[Callable[[], None]] = []
        self.settled: list[Callable[[], None]] = []
        self.after: list[Callable[[], None]] = []
        self._leave = leave
        self._end = end
        self._is_leaving = False
        self._state = state
        self._loop_thread = loop_thread
        self._transport = transport
        self._loans = loans
        self._actors = actors
        self._casts = casts
        self._children = children
        self._owners = owners
        requests.serve(EXIT, self._asked_to_exit)

    def shutdown(self, *, grace_s: float) -> None:
        """Stop what the script owns, in good order if that takes no longer than ``grace_s``; then leave the job."""
        if self._state.closing:
            return
        deadline = time.monotonic() + grace_s
        for call in list(self.before):  # which may remove itself, and others, from the list
            call()
        if self._owners.root is not None:
            self._owners.root.stop_owned(deadline)
        self._state.closing = True
        self._stop_actors(deadline)
        self._children.hurry()
        children = self._children.alive()
        self._children.kill([child.ref.id for child in children], "was killed because the script ends")
        for child in children:
            child.ended.get(KILL_TIMEOUT_S)
        self._children.close()
        for call in list(self.settled):
            call()
        self._loans.clear()
        self._close_transport()
        for call in list(self.after):
            call()

    def _asked_to_exit(self, mail: Mail, timeout: float) -> Future[None]:
        """End a worker process within ``timeout`` seconds: its actors first. Returns at once."""
        acknowledged: Promise[None] = Promise()
        arguments = (acknowledged, time.monotonic(), timeout)
        threading.Thread(target=self._exit, args=arguments, name="control-exit", daemon=True).start()
        return acknowledged

    def _exit(self, acknowledged: Promise[None], began_s: float, timeout: float) -> None:
        self._stop_actors(began_s + _ACTORS * timeout)
        if self._is_leaving:  # a second request, with less time, was faster
            return
        self._is_leaving = True
        self._casts.relays.flush()
        for call in list(self.settled):
            call()
        self._state.closing = True
        acknowledged.set_result(None)
        self._close_transport()
        if self._leave is not None:
            self._leave(max(began_s + _LEAVE * timeout - time.monotonic(), 0.0))
        self._end()

    def _close_transport(self) -> None:
        with contextlib.suppress(TimeoutError):  # as after a time in which this process stood still: it ends anyway
            self._loop_thread.run(self._transport.close(), timeout=CLOSE_TIMEOUT_S)

    def _stop_actors(self, deadline: float) -> None:
        """Stop the actors of this process, and wait until a deadline, also for actors that were stopped before."""
        actors, stops = self._actors, self._actors.stops
        bound_s = HANDED_DOWN * max(deadline - time.monotonic(), 0.0)
        ends = [actors.stop(actor.uid, bound_s) for actor in reversed(actors.live())]
        unwinding = []
        for actor in actors.ending():
            is_for_nobody = actor.has_failed() and not actor.winds_up.done()
            stops.within(actor, bound_s, cut_now=is_for_nobody)
            if is_for_nobody:
                unwinding.append(actor)
            else:
                ends.append(actor.ended)
        patience = min(time.monotonic() + UNWIND_S, deadline)
        # Wait for their cleanup if it begins. Their endpoints may run uninterruptible code, for which nobody waits.
        ends += [actor.ended for actor in unwinding if _comes(actor.winds_up, patience)]
        for end in ends:
            _comes(end, deadline)


def end_process() -> None:
    """End this process of the operating system in good order, at once."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _comes(future: Future[None], deadline: float) -> bool:
    """Whether a future ends before a deadline."""
    try:
        future.get(max(deadline - time.monotonic(), 0))
    except ControlError:
        return future.done()  # it has ended with an error, which was logged
    return True


THREADS_S = 5.0
"""How long to wait for threads that are not daemons. Many never end, since nobody expected their process to end."""


class Leaving:
    """Makes the main thread return, and ensures that the process ends.

    Args:
        told: descriptor of the eventfd at which the main thread waits.
        name: of the process, for people.
    """

    def __init__(self, told: int, name: str) -> None:
        self._told = told
        self._name = name

    def __call__(self, bound_s: float) -> None:
        """Let threads, ``atexit`` handlers and finalizers run; on a daemon thread. Returns only if they do not end."""
        until_s = time.monotonic() + bound_s
        is_beyond_threads = threading.Event()
        atexit.register(is_beyond_threads.set)  # the last to be registered, and so the first to be called
        os.eventfd_write(self._told, 1)
        if is_beyond_threads.wait(min(THREADS_S, bound_s / 2)):
            time.sleep(max(until_s - time.monotonic(), 0.0))  # the process ends during this
            self._complain(f"its exit handlers have not ended within {bound_s:.3g} s:\n{_main_stack()}")
            return
        left = [thread.name for thread in threading.enumerate() if not thread.daemon and thread.ident != _main_id()]
        self._complain(f"its threads {', '.join(left) or '(none any more)'} have not ended; they would, as daemons\n")
        atexit._run_exitfuncs()

    def _complain(self, what: str) -> None:
        sys.stderr.write(f"control: process {self._name} was ended by force: {what}")


def _main_id() -> int | None:
    return threading.main_thread().ident


def _main_stack() -> str:
    frame = sys._current_frames().get(_main_id() or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else ""
