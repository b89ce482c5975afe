"""The fork server: a process with one thread that has imported modules, and from which others are forked.

It opens nothing, knows no secret and runs no code of a job; what it imports costs its forked processes nothing.
Imported libraries must not be in use yet, so it refuses to continue if a thread is left, a device is open or gRPC has
been imported: gRPC, UCX and CUDA start only in the forked processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from skipper.control.runtime.procs import guard
from skipper.control.runtime.procs.fork_messages import Birth, Born, Prepare, Ready, Unable, receive, send

OF_EVERY_WORKER = (
    "asyncio",
    "concurrent.futures",
    "skipper.control.runtime.requests",
    "skipper.control.runtime.procs.children",
    "skipper.control.runtime.procs.ending",
    "skipper.control.runtime.flow_control",
    "skipper.control.runtime.current_runtime",
    "skipper.control.runtime.loop",
    "skipper.control.runtime.ownership",
    "skipper.control.runtime.cast.sender",
    "skipper.control.wire.bulk",
    "skipper.control.wire.frames",
    "skipper.control.wire.payload",
)
"""What a worker imports anyway, except gRPC."""
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/infiniband/")


@dataclass(frozen=True, slots=True)
class Newborn:
    """What a forked process starts with; it owns the descriptors.

    Attributes:
        birth: the request.
        changes: the environment variables that modules changed while they were imported; None: they removed the
            variable.
        pipe: where its config comes from.
        directory: its working directory.
        stdout: its standard output.
        stderr: its standard error.
    """

    birth: Birth
    changes: dict[str, str | None]
    pipe: int
    directory: int
    stdout: int
    stderr: int


class ForkServer:
    """The server's side.

    Args:
        connection: to the process that asks.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._is_asked = True
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._keepers = guard.Keepers(self._poll)
        self._changes: dict[str, str | None] = {}
        self._on_child: Any = signal.SIG_DFL

    def prepare(self) -> None:
        """Import the requested modules, and say whether processes can be forked now; if not, this process ends."""
        wanted, _ = receive(self._connection, descriptors=0)
        assert isinstance(wanted, Prepare)
        sys.path[:] = wanted.sys_path
        show_as([*sys.orig_argv[:-1], ",".join(wanted.modules)])
        looked_up: set[str] = set()
        before = dict(os.environ)
        try:
            with _noting_variables(looked_up):
                for module in OF_EVERY_WORKER + wanted.modules:
                    importlib.import_module(module)
            # If the script ignored its children's ends, there would be none to reap. None: a handler in C.
            self._on_child = signal.signal(signal.SIGCHLD, signal.SIG_DFL) or signal.SIG_DFL
            _end_idle_pools()
            reason = _why_not_to_fork()
        except Exception as error:  # noqa: BLE001  (of whatever is imported, and told to who asked for it)
            reason = f"{type(error).__name__}: {error}"
        if reason:
            send(self._connection, Unable(reason))
            os._exit(1)
        self._changes = {name: os.environ.get(name) for name, _ in before.items() ^ os.environ.items()}
        gc.collect()
        gc.freeze()  # never looked at again, not even by forked processes: so the pages stay shared
        send(self._connection, Ready(frozenset(looked_up)))

    def serve(self) -> Newborn:
        """Fork and reap until nobody asks any more and no child is left. Returns only in forked processes."""
        guard.adopt_orphans()  # of killed keepers
        pause: float | None = None
        while self._is_asked or self._keepers:
            for descriptor, _ in self._poll.poll(pause):
                if descriptor in self._keepers:
                    self._keepers.bury(descriptor)
                elif (newborn := self._answer()) is not None:
                    return newborn
            pause = self._keepers.end_orphans()
        os._exit(0)

    def _answer(self) -> Newborn | None:
        try:
            birth, descriptors = receive(self._connection, descriptors=4)
        except (EOFError, ConnectionError):
            self._poll.unregister(self._connection)
            self._is_asked = False
            return None
        except OSError as error:
            self._reply(error)
            return None
        try:
            keeper = self._fork()
        except OSError as error:
            self._reply(error)
            keeper = -1
        if keeper:
            for descriptor in descriptors:
                os.close(descriptor)
            return None
        self._connection.close()
        signal.signal(signal.SIGCHLD, self._on_child)
        return Newborn(birth, self._changes, *descriptors)

    def _fork(self) -> int:
        """Fork, like `os.fork`; returns the keeper's process id. The keeper answers the request."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # the output of the imports has no reader any more
                stream.flush()
        return self._keepers.fork(self._tell)

    def _tell(self, pid: int, *handles: int) -> None:
        if pid > 0:
            self._reply(Born(pid), *handles)
        else:
            self._reply(OSError(-pid, os.strerror(-pid)))

    def _reply(self, message: object, *descriptors: int) -> None:
        with contextlib.suppress(ConnectionError):  # the client is gone: the next receive says so
            send(self._connection, message, descriptors)


def settle(newborn: Newborn, argv: list[str]) -> None:
    """Give a forked process everything of its own that an executed one would have.

    Args:
        newborn: what it starts with; only the pipe of its descriptors stays open.
        argv: the command that would have executed it.
    """
    os.fchdir(newborn.directory)
    os.dup2(newborn.stdout, 1)
    os.dup2(newborn.stderr, 2)
    for descriptor in (newborn.directory, newborn.stdout, newborn.stderr):
        os.close(descriptor)
    environment = newborn.birth.environment | newborn.changes
    os.environ.clear()
    os.environ.update({name: value for name, value in environment.items() if value is not None})
    sys.argv[:] = argv[1:]
    sys.orig_argv[:] = argv
    show_as(argv)
    importlib.invalidate_caches()  # files may have come since the server looked
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]  # the interpreter forgets to
    draw_anew()


def draw_anew() -> None:
    """Draw new random values for libraries that drew some while they were imported. Python does so for `random`."""
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()
    if (multiprocessing := sys.modules.get("multiprocessing.process")) is not None:
        multiprocessing.current_process().authkey = os.urandom(32)


def show_as(argv: list[str]) -> None:
    """Make the kernel show this as the command line of this process, as far as there is room for it."""
    fields = open("/proc/self/stat", "rb").read().rpartition(b")")[2].split()  # noqa: SIM115
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc_pid_stat(5)
    if start < end:
        text = b"\0".join(map(os.fsencode, argv))[: end - start - 1]
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


@contextlib.contextmanager
def _noting_variables(names: set[str]) -> Iterator[None]:
    """Record which environment variables are read."""
    encode = os.environ.encodekey

    def note(name: str) -> str:
        names.add(name)
        return encode(name)

    os.environ.encodekey = note
    try:
        yield
    finally:
        os.environ.encodekey = encode


def _end_idle_pools() -> None:
    """Fork once: libraries that start idle threads while they are loaded, such as OpenBLAS, end them for a fork."""
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def _why_not_to_fork() -> str:
    """What would be broken in a copy of this process; empty if nothing."""
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return f"{threads - 1} threads are running after the imports"
    if "grpc._cython.cygrpc" in sys.modules:
        return "gRPC has been imported"
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the scan itself
            if (target := os.readlink(entry.path)).startswith(_DEVICES):
                return f"{target} has been opened"
    return ""
