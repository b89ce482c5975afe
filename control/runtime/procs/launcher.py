"""`Launcher`: starts processes, all from one thread that lives as long as this process.

A process is executed by a guard (see `Guards`), which this thread has started, or forked from a server (see
`ForkServers`) that the guard has executed. In between is a keeper of its own: the process, and everything that it has
started, ends with the keeper (see `guard`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from skipper.control.runtime.procs import guard, thread_limit
from skipper.control.runtime.procs.binding import CpuBinding
from skipper.control.runtime.procs.fork_servers import ForkServers
from skipper.control.runtime.procs.guards import AnswerError, Guards, Kept
from skipper.control.runtime.procs.inheritance import Surroundings
from skipper.control.runtime.procs.worker_config import WorkerConfig, command_of_worker

if TYPE_CHECKING:
    import asyncio

CLOSE_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)


class StartedProcess(Protocol):
    """A process that has been started, as its watcher sees it; see `Kept`."""

    @property
    def pid(self) -> int:
        """Its process id."""

    @property
    def pidfd(self) -> int:
        """Readable once it has ended; the receiver closes it."""

    def kill(self) -> None:
        """Send SIGKILL; harmless if it has ended."""

    def when_buried(
        self,
        loop: asyncio.AbstractEventLoop,
        describe: Callable[[int], str],
        done: Callable[[str], None],
        cleared: Callable[[], None],
    ) -> None:
        """Report how it has ended, and then that no descendant of it is left. On the loop's thread, after its end."""


@dataclass(frozen=True, slots=True)
class Launched:
    """A child that has been started.

    Attributes:
        process: the process.
        lifeline: this process' end of its pipe, which closes when this process ends; the receiver closes it. None: it
            has no pipe.
    """

    process: StartedProcess
    lifeline: int | None


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """A child to start.

    Attributes:
        config: what it needs to know.
        done: called on the launcher's thread when it has been started, or with the reason why not.
    """

    config: WorkerConfig
    done: Callable[[Launched | OSError], None]


class ChildLauncher(Protocol):
    """Starts the children of one process; see `Launcher`."""

    def launch(self, launches: Sequence[LaunchRequest], env: Mapping[str, str], modules: tuple[str, ...]) -> None:
        """Start children; returns at once."""

    def hurry(self) -> None:
        """Wait for nothing any more: what is started from now on will be killed soon."""

    def close(self) -> None:
        """End its helper processes; every child is gone."""


class Launcher:
    """The thread that starts children."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._hurry = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._guards = Guards(self._hurry)
        self._servers = ForkServers(self._guards, self._hurry)
        self._thread = threading.Thread(target=self._run, name="control-launcher", daemon=True)
        thread_limit.start(self._thread)

    def launch(self, launches: Sequence[LaunchRequest], env: Mapping[str, str], modules: tuple[str, ...]) -> None:
        """Start children, with variables besides this process' own, and with modules that are imported already."""
        try:
            surroundings = Surroundings.now(env, launches[0].config.sys_path)
        except OSError as error:
            for launch in launches:
                launch.done(error)
            return

        def job() -> None:
            with surroundings:
                for launch in launches:
                    self._launch(launch, modules, surroundings)

        self._jobs.put(job)

    def hurry(self) -> None:
        """Wait for no server or guard any more, now and later: what is started from now on will be killed soon."""
        os.eventfd_write(self._hurry, 1)

    def close(self) -> None:
        """End the thread, and the fork servers and guards with everything that they have started."""
        self._jobs.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():
            os.close(self._hurry)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
        self._servers.close()
        self._guards.close()

    def _launch(self, launch: LaunchRequest, modules: tuple[str, ...], surroundings: Surroundings) -> None:
        try:
            launched = self._start(launch.config, modules, surroundings)
        except OSError as error:
            launch.done(error)
            return
        assert launched.lifeline is not None  # see `_with_pipe`
        with contextlib.suppress(BrokenPipeError):  # it has died already, which its pidfd shows
            _write_all(launched.lifeline, launch.config.encode())
        launch.done(launched)

    def _start(self, config: WorkerConfig, modules: tuple[str, ...], surroundings: Surroundings) -> Launched:
        timeout = config.settings.connect_timeout_s / 2

        def fork(pipe: int) -> Kept | None:
            return self._servers.fork(modules, config.me.name, pipe, surroundings, timeout)

        def execute(pipe: int) -> Kept:
            command = command_of_worker(guard.FIRST_FD, guard.PARENT, config.me.name)
            return self._guards.start(command, surroundings, (pipe,), timeout)

        launched = None
        if modules and config.binding == CpuBinding():  # thread pools count the CPUs when their library is loaded
            launched = _with_pipe(fork)
        if launched is None:
            try:
                launched = _with_pipe(execute)
            except AnswerError as error:
                logger.warning("%s: another one starts %s", error, config.me.name)
                launched = _with_pipe(execute)
        assert launched is not None  # only servers refuse
        return launched


def _with_pipe(start: Callable[[int], Kept | None]) -> Launched | None:
    """Start a process that reads from a pipe of its own. If it starts too late, the pipe is closed, and it ends."""
    child_end, lifeline = os.pipe()
    process = None
    try:
        process = start(child_end)
    finally:
        os.close(child_end)
        if process is None:
            os.close(lifeline)
    return None if process is None else Launched(process, lifeline)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
