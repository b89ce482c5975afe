"""`Launcher`: starts child processes, all from one thread that lives as long as this process.

The kernel's parent-death signal follows the *thread* that made the child, so a child made by a short-lived thread
would be killed when that thread ends.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from control.runtime.binding import Binding
from control.settings import Settings
from control.wire.envelope import ProcessRef

WORKER = Path(__file__).with_name("worker.py")
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
    """

    me: ProcessRef
    parent: ProcessRef
    root: ProcessRef
    secret: bytes
    sys_path: tuple[str, ...]
    settings: Settings
    bootstrap: tuple[bytes, ...]
    binding: Binding

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
class Launched:
    """A child that has been started.

    Attributes:
        popen: its process.
        pidfd: readable once it has ended; the receiver closes it.
        lifeline: our end of its pipe, which tells it of our end; the receiver closes it.
    """

    popen: subprocess.Popen[bytes]
    pidfd: int
    lifeline: int


class Launcher:
    """The thread that starts children."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="control-launcher", daemon=True)
        self._thread.start()

    def launch(self, config: WorkerConfig, env: Mapping[str, str], done: Callable[[Launched | OSError], None]) -> None:
        """Start a child and tell ``done``, on the launcher's thread, or tell it why that failed."""

        def job() -> None:
            try:
                launched = _launch(config, env)
            except OSError as error:
                done(error)
            else:
                done(launched)

        self._jobs.put(job)

    def close(self) -> None:
        """End the thread, once there are no children: those that are left die with it."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def _launch(config: WorkerConfig, env: Mapping[str, str]) -> Launched:
    child_end, lifeline = os.pipe()
    try:
        popen = subprocess.Popen(
            [sys.executable, str(WORKER), str(child_end), str(os.getpid()), config.me.name],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **env},
            pass_fds=(child_end,),
        )
    except OSError:
        os.close(lifeline)
        raise
    finally:
        os.close(child_end)
    pidfd = os.pidfd_open(popen.pid)
    with contextlib.suppress(BrokenPipeError):  # it has died already, which its pidfd tells
        _write_all(lifeline, config.encode())
    return Launched(popen, pidfd, lifeline)


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
