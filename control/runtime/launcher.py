"""`Launcher`: starts child processes, all from one thread that lives as long as this process.

The kernel's parent-death signal follows the *thread* that made the child, so a child made by a short-lived thread
would be killed when that thread ends. A child is executed, or forked from a server (see `ForkServers`) that this
thread has executed: then its death is the server's, and the server's death its own.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import struct
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from control.runtime import thread_limit, worker
from control.runtime.binding import Binding
from control.runtime.capture import Redirection
from control.runtime.fork_servers import Forked, ForkServers
from control.runtime.inheritance import Surroundings
from control.settings import Settings
from control.wire.envelope import ProcessRef

if TYPE_CHECKING:
    import asyncio

CLOSE_TIMEOUT_S = 5.0
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What a child needs to know; it comes to it through the pipe that also tells it of its parent's end.

    Attributes:
        me: the child.
        parent: the process that launches it.
        root: the script.
        secret: the job's secret.
        sys_path: where the parent imports from.
        settings: the parent's.
        bootstrap: a packed callable to run before anything else, or empty.
        binding: the CPUs and the memory that the child is bound to.
        certs: the folder with its certificates for TLS with other hosts; None: none.
        data_plane_is_open: whether the data plane may be used with other hosts.
        redirection: where what it writes is to go; None: to where the parent's went.
    """

    me: ProcessRef
    parent: ProcessRef
    root: ProcessRef
    secret: bytes
    sys_path: tuple[str, ...]
    settings: Settings
    bootstrap: tuple[bytes, ...]
    binding: Binding
    certs: str | None = None
    data_plane_is_open: bool = True
    redirection: Redirection | None = None

    def encode(self) -> bytes:
        """The bytes to write into the pipe."""
        body = pickle.dumps(self, protocol=5)
        return _LENGTH.pack(len(body)) + body

    def __repr__(self) -> str:
        return f"WorkerConfig(me={self.me!r})"  # never the secret


def read_config(pipe: int) -> WorkerConfig:
    """Read the config from the pipe.

    Raises:
        EOFError: the parent ended before it had written it.
    """
    (nbytes,) = _LENGTH.unpack(_read_exactly(pipe, _LENGTH.size))
    config = pickle.loads(_read_exactly(pipe, nbytes))
    assert isinstance(config, WorkerConfig)  # the other end is our own launcher
    return config


@dataclass(frozen=True, slots=True)
class Executed:
    """A process that this one has executed, in the same terms as `Forked`."""

    popen: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.popen.pid

    def when_buried(
        self, loop: asyncio.AbstractEventLoop, describe: Callable[[int], str], done: Callable[[str], None]
    ) -> None:
        """Reap it, and say how it has ended; after its end."""
        done(describe(self.popen.wait()))  # does not wait: the pidfd is readable


@dataclass(frozen=True, slots=True)
class Launched:
    """A child that has been started.

    Attributes:
        process: knows its process id, and how it has ended.
        pidfd: readable once it has ended; the receiver closes it.
        lifeline: our end of its pipe, which tells it of our end; the receiver closes it.
    """

    process: Executed | Forked
    pidfd: int
    lifeline: int


@dataclass(frozen=True, slots=True)
class Launch:
    """A child that is to be started.

    Attributes:
        config: what it needs to know.
        done: told on the launcher's thread that it has been started, or why it could not be.
    """

    config: WorkerConfig
    done: Callable[[Launched | OSError], None]


class Launcher:
    """The thread that starts children."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._hurry = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._servers = ForkServers(self._hurry)
        self._thread = threading.Thread(target=self._run, name="control-launcher", daemon=True)
        thread_limit.start(self._thread)

    def launch(self, launches: Sequence[Launch], env: Mapping[str, str], modules: tuple[str, ...]) -> None:
        """Start children, with variables besides those of this process, and with modules that are imported already."""
        config = launches[0].config
        surroundings = Surroundings.now(env, config.sys_path) if modules else None

        def job() -> None:
            if surroundings is None:
                for launch in launches:
                    self._launch(launch, lambda config: _execute(config, {**os.environ, **env}))
                return
            with surroundings:
                for launch in launches:
                    self._launch(launch, lambda config: self._fork_or_execute(config, modules, surroundings))

        self._jobs.put(job)

    def hurry(self) -> None:
        """Wait for no fork server any more, now and later: what is started from now on is about to be killed."""
        os.eventfd_write(self._hurry, 1)

    def close(self) -> None:
        """End the thread and the fork servers, once there are no children: those that are left die with them."""
        self._jobs.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():
            os.close(self._hurry)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
        self._servers.close()

    def _launch(self, launch: Launch, start: Callable[[WorkerConfig], Launched]) -> None:
        try:
            launched = start(launch.config)
        except OSError as error:
            launch.done(error)
            return
        with contextlib.suppress(BrokenPipeError):  # it has died already, which its pidfd tells
            _write_all(launched.lifeline, launch.config.encode())
        launch.done(launched)

    def _fork_or_execute(self, config: WorkerConfig, modules: tuple[str, ...], surroundings: Surroundings) -> Launched:
        if config.binding == Binding():  # thread pools count the CPUs when their library is loaded
            child_end, lifeline = os.pipe()
            forked = None
            try:
                timeout = config.settings.connect_timeout_s / 2
                forked = self._servers.fork(modules, config.me.name, child_end, surroundings, timeout)
            finally:
                os.close(child_end)
                if forked is None:
                    os.close(lifeline)
            if forked is not None:
                return Launched(forked, forked.pidfd, lifeline)
        return _execute(config, surroundings.environment, surroundings)


def _execute(config: WorkerConfig, environment: Mapping[str, str], around: Surroundings | None = None) -> Launched:
    child_end, lifeline = os.pipe()
    try:
        popen = subprocess.Popen(
            worker.command(child_end, os.getpid(), config.me.name),
            stdin=subprocess.DEVNULL,
            stdout=None if around is None else around.stdout,
            stderr=None if around is None else around.stderr,
            cwd=None if around is None else f"/proc/self/fd/{around.directory}",
            env=environment,
            pass_fds=(child_end,),
        )
    except OSError:
        os.close(lifeline)
        raise
    finally:
        os.close(child_end)
    return Launched(Executed(popen), os.pidfd_open(popen.pid), lifeline)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _read_exactly(fd: int, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        chunk = os.read(fd, nbytes - len(data))
        if not chunk:
            raise EOFError("the parent has ended")
        data += chunk
    return data
