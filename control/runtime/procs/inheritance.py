"""What a process inherits from its parent besides its arguments: `Surroundings`, and the kernel's part of them.

A process that is executed gets all of it by itself. A process that is forked from a server gets the server's, which the
server inherited from the same parent earlier: what has changed since then is either handed over or needs another
server.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

_OF_THE_KERNEL = frozenset(
    (
        *("Umask", "Uid", "Gid", "Groups", "NoNewPrivs", "Seccomp", "SigBlk", "SigIgn"),
        *("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "Cpus_allowed", "Mems_allowed"),
    )
)
"""Lines of proc_pid_status(5) that a child has in common with the thread that starts it."""
_RLIMITS = tuple(getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))


@dataclass(slots=True)
class Surroundings:
    """What a script's processes inherit, as it was when they were requested.

    A context manager, which closes its descriptors.

    Attributes:
        given: the variables that were stated for these processes.
        environment: all variables, those included.
        sys_path: where the parent imports from.
        directory: descriptor of the working directory.
        stdout: copy of the standard output.
        stderr: copy of the standard error.
        place: the working directory as an import from a relative path sees it; empty where there is no such path.
    """

    given: dict[str, str]
    environment: dict[str, str]
    sys_path: tuple[str, ...]
    directory: int
    stdout: int
    stderr: int
    place: str

    @staticmethod
    def now(given: Mapping[str, str], sys_path: tuple[str, ...]) -> Surroundings:
        """The present ones; the root folder and null if this process has no directory or no output.

        Raises:
            OSError: there are no descriptors left.
        """
        opened: list[int] = []
        try:
            opened.append(directory := _open_or(".", "/"))
            opened.append(stdout := _copy(1))
            opened.append(stderr := _copy(2))
        except OSError:
            for descriptor in opened:
                os.close(descriptor)
            raise
        return Surroundings(dict(given), {**os.environ, **given}, sys_path, directory, stdout, stderr, _place(sys_path))

    def descriptors(self) -> tuple[int, int, int]:
        """The working directory, the standard output and the standard error."""
        return self.directory, self.stdout, self.stderr

    def __enter__(self) -> Surroundings:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for descriptor in self.descriptors():
            os.close(descriptor)


def _open_or(directory: str, other: str) -> int:
    try:
        return os.open(directory, os.O_PATH | os.O_DIRECTORY)
    except (PermissionError, FileNotFoundError):
        return os.open(other, os.O_PATH | os.O_DIRECTORY)


def _copy(stream: int) -> int:
    try:
        return os.dup(stream)
    except OSError as error:
        if error.errno != errno.EBADF:  # otherwise it is closed
            raise
        return os.open(os.devnull, os.O_WRONLY)


def _place(sys_path: tuple[str, ...]) -> str:
    try:
        is_relative = any(not os.path.isabs(entry) and os.path.exists(entry or ".") for entry in sys_path)
        return os.getcwd() if is_relative else ""
    except FileNotFoundError:  # the directory has been removed
        return ""


def of_the_kernel() -> tuple[object, ...]:
    """What the kernel hands from the calling thread to a child: rights, masks, limits, priorities, groups."""
    return (
        tuple(line for line in _of_proc("status").splitlines() if line.partition(":")[0] in _OF_THE_KERNEL),
        tuple(resource.getrlimit(limit) for limit in _RLIMITS),
        _of_proc("cgroup"),
        _of_proc("oom_score_adj"),
        os.getpriority(os.PRIO_PROCESS, 0),
        os.sched_getscheduler(0),
        os.getpgrp(),
        os.getsid(0),
    )


def _of_proc(name: str) -> str:
    """A file of /proc about the calling thread; empty if the kernel was built without it."""
    try:
        return Path("/proc/thread-self", name).read_text()
    except FileNotFoundError:
        return ""
