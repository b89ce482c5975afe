"""`HollowProcess`: one process of a job without an operating system process of its own.

Its runtime is the real one: links, table of actors, trees, heartbeats, supervision. It shares threads and imported
modules. Where the kernel would end a process, at SIGKILL, its sockets are closed here.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from skipper.control.model.errors import ControlError
from skipper.control.model.future import Future
from skipper.control.runtime import current_runtime
from skipper.control.runtime.assembly import build_process
from skipper.control.runtime.procs.launcher import Launched, LaunchRequest
from skipper.control.runtime.shared_parts import SharedParts

if TYPE_CHECKING:
    from skipper.control.cluster.hollow.ground import Ground
    from skipper.control.runtime.messages import Mail
    from skipper.control.runtime.process import Process
    from skipper.control.wire.process_ref import ProcessRef

KILLED = -signal.SIGKILL


class HollowProcess:
    """A process of a job, and the hollow processes that it launches.

    Args:
        ground: the shared threads.
        me: the process.
        root: the script of its job.
        secret: the job's secret.
        on_end: called once, on any thread, with its exit status when nothing is left of it.

    Raises:
        WireError: it cannot listen.
    """

    def __init__(
        self, ground: Ground, me: ProcessRef, root: ProcessRef, secret: bytes, on_end: Callable[[int], object]
    ) -> None:
        self._ground = ground
        self._on_end = on_end
        self._lock = threading.Lock()
        self._is_ending = False
        self._launcher = HollowLauncher(ground)
        self._cutting: asyncio.Task[None] | None = None
        shared = SharedParts(
            network_for=ground.network_for,
            executor_for=ground.actors.executor_for,
            launcher=self._launcher,
            end=lambda: self._end(0),
        )
        self.runtime = build_process(
            me,
            root,
            secret,
            ground.loop_thread,
            data_plane_is_open=False,
            shared=shared,
            extensions=(*current_runtime.extensions(), _leave_output),
        )
        ground.living.add(self)

    @property
    def children(self) -> list[HollowProcess]:
        """The processes that it has launched and that have not ended, in launch order."""
        return self._launcher.alive()

    def kill(self, status: int = KILLED) -> None:
        """End it at once, with all that it has launched: sockets just close. Idempotent, from any thread."""
        with self._lock:
            if self._is_ending:
                return
            self._is_ending = True
        self.runtime.state.closing = True
        self._ground.on_loop(self._cut, status)

    def stand_still(self) -> None:
        """Stop all communication of it, and of what it has launched; from any thread but the loop's."""
        self._ground.until_done_on_loop(self.runtime.transport.stand_still)
        for child in self.children:
            child.stand_still()

    def _cut(self, status: int) -> None:
        self._cutting = self._ground.loop_thread.loop.create_task(self.runtime.transport.cut())
        self._cutting.add_done_callback(lambda _: self._bury(status))

    def _end(self, status: int) -> None:
        """Note that it has ended in good order."""
        with self._lock:
            if self._is_ending:
                return
            self._is_ending = True
        self._bury(status)

    def _bury(self, status: int) -> None:
        for child in self.children:
            child.kill()
        self.runtime.loans.clear()
        self._ground.living.discard(self)
        self._on_end(status)


class HollowChild:
    """A hollow process, seen from its launcher: a `StartedProcess`."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.pidfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.process: HollowProcess | None = None
        self._lock = threading.Lock()
        self._status: int | None = None

    def begin(self, process: HollowProcess) -> None:
        """Set its process; if it was killed before, it ends now."""
        with self._lock:
            self.process = process
            is_over = self._status is not None
        if is_over:
            process.kill()

    def end(self, status: int) -> None:
        """Note that it is gone; only the first status counts."""
        with self._lock:
            if self._status is not None:
                return
            self._status = status
        os.eventfd_write(self.pidfd, 1)

    def kill(self) -> None:
        """End it like SIGKILL."""
        if self.process is None:
            self.end(KILLED)
        else:
            self.process.kill()

    def when_buried(
        self,
        loop: asyncio.AbstractEventLoop,
        describe: Callable[[int], str],
        done: Callable[[str], None],
        cleared: Callable[[], None],
    ) -> None:
        """Report how it has ended; what it has launched was killed before."""
        done(describe(self._status or 0))
        cleared()


class HollowLauncher:
    """Starts the hollow children of one hollow process: a `ChildLauncher`."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._children: list[HollowChild] = []
        """The children that have not ended."""

    def alive(self) -> list[HollowProcess]:
        """The processes that it has started and that have not ended."""
        return [child.process for child in list(self._children) if child.process is not None]

    def launch(self, launches: Sequence[LaunchRequest], env: Mapping[str, str], modules: tuple[str, ...]) -> None:
        """Start children; they have the environment and the modules of the containing process."""
        for launch in launches:
            self._ground.soon(lambda launch=launch: self._start(launch))  # type: ignore[misc]

    def hurry(self) -> None:
        """Do nothing: there are no waits."""

    def close(self) -> None:
        """Do nothing: there are no helper processes."""

    def _start(self, launch: LaunchRequest) -> None:
        config = launch.config
        if config.bootstrap:
            launch.done(OSError(errno.ENOTSUP, "a hollow process runs no bootstrap"))
            return
        child = HollowChild()
        self._children.append(child)

        def ended(status: int) -> None:
            self._children.remove(child)
            child.end(status)

        launch.done(Launched(child, None))
        try:
            process = HollowProcess(self._ground, config.me, config.root, config.secret, ended)
        except (ControlError, OSError):
            ended(1)
            raise
        child.begin(process)
        current_runtime.meet_parent(process.runtime, config, lambda _: process.kill())


def _leave_output(process: Process) -> None:
    """Answer redirections of output without an effect: what it prints is output of the containing process."""
    from skipper.control.observe import job_query

    def survey(mail: Mail) -> None:
        question = job_query.SURVEY.unpack(mail.message.payload)
        if question.subject == "logs":
            process.requests.answer(mail, Future.of([]))
        else:
            threading.Thread(target=job_query.serve, args=(process, mail), name="control-survey", daemon=True).start()

    process.requests.serve_by_name("survey", survey)
