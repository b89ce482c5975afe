"""How a worker is executed, what its exit statuses mean, and `WorkerConfig`: what its launcher sends it."""

from __future__ import annotations

import os
import pickle
import struct
import sys
from dataclasses import dataclass

from skipper.control.model.settings import Settings
from skipper.control.runtime.procs.binding import CpuBinding
from skipper.control.runtime.procs.output_capture import Redirection
from skipper.control.wire.process_ref import ProcessRef

FORK_SERVER = "fork-server"
EXIT_ORPHAN = 96
"""Exit status of a child that has lost the process that launched it."""
EXIT_BOOTSTRAP = 97
"""Exit status of a child whose bootstrap callable raised."""
EXIT_BINDING = 98
"""Exit status of a child if the kernel refused its CPU or memory binding."""
EXIT_THREADS = 99
"""Exit status of a child that could not start the threads that it needs."""

_WORKER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "worker.py")


def command_of_worker(pipe: int, parent: int | str, name: str) -> list[str]:
    """The command for a child that reads its config from ``pipe``."""
    return [sys.executable, _WORKER, str(pipe), str(parent), name]


def command_of_fork_server(connection: int, parent: int | str) -> list[str]:
    """The command for a fork server that takes requests over the socket ``connection``."""
    return [sys.executable, _WORKER, FORK_SERVER, str(connection), str(parent)]


_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What a child needs to know; it comes through the pipe that also closes when the parent ends.

    Attributes:
        me: the child.
        parent: the process that launches it.
        root: the script.
        secret: the job's secret.
        sys_path: where the parent imports from.
        settings: the parent's settings.
        bootstrap: a packed callable to run before anything else, or empty.
        binding: the CPUs and the memory that the child is bound to.
        certs: the folder with its certificates for TLS with other hosts; None: none.
        data_plane_is_open: whether the data plane may be used with other hosts.
        redirection: where its output is to go; None: where the parent's goes.
    """

    me: ProcessRef
    parent: ProcessRef
    root: ProcessRef
    secret: bytes
    sys_path: tuple[str, ...]
    settings: Settings
    bootstrap: tuple[bytes, ...]
    binding: CpuBinding
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
    assert isinstance(config, WorkerConfig)  # the other end is this library's launcher
    return config


def _read_exactly(fd: int, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        chunk = os.read(fd, nbytes - len(data))
        if not chunk:
            raise EOFError("the parent has ended")
        data += chunk
    return data
