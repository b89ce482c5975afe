"""The identity of a process, safe against reused process ids, and notifications of its death."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from skipper.control import ProcMesh
from skipper.torchstore.support.compact import compact


@compact
@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process of this job.

    Attributes:
        host: Boot id and pid namespace: equal for processes that can see each other's ids.
        start: Start time in clock ticks since boot, field 22 of proc(5)'s stat: a later process with the
            same pid has another.
    """

    host: str
    pid: int
    start: int

    @property
    def is_local(self) -> bool:
        """Whether its pid is valid in this process' namespace."""
        return self.host == _host()

    def is_alive(self) -> bool:
        """Whether it is still running; a process of another host counts as alive."""
        return not self.is_local or _start_time(self.pid) == self.start

    def __str__(self) -> str:
        return f"process {self.pid}" if self.is_local else f"process {self.pid} on {self.host[:8]}"


def this_process() -> ProcessId:
    """The identity of the calling process."""
    return _identify(os.getpid())  # by pid, so that a forked child does not inherit its parent's


@lru_cache(maxsize=1)
def _identify(pid: int) -> ProcessId:
    start = _start_time(pid)
    if start is None:
        raise OSError(f"/proc/{pid}/stat cannot be read: is /proc mounted?")
    return ProcessId(_host(), pid, start)


@lru_cache(maxsize=1)
def _host() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


def _start_time(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except OSError:
        return None
    # The command name may contain spaces and brackets: fields are counted after the last bracket.
    state, *fields = stat[stat.rindex(b")") + 2 :].split()
    return None if state in (b"Z", b"X") else int(fields[18])


class DeathNotice:
    """Calls ``on_death(process)`` in the event loop in which the process was added, once for each time it was added.

    A pidfd becomes readable when a process of this host dies. For processes of other hosts, and for all that have left
    the job or are stopped, which also count as gone, control reports the end. Nothing is polled.
    """

    def __init__(self, on_death: Callable[[ProcessId], None]) -> None:
        self._on_death = on_death
        self._fds: dict[ProcessId, int] = {}
        self._members: dict[ProcessId, set[str]] = {}

    def add(self, process: ProcessId, procs: ProcMesh | None = None) -> None:
        """Watch a process; idempotent. A process that is dead already is reported soon.

        ``procs`` is the same process for control; without it a process of another host is not watched.
        """
        if procs is not None:
            self._watch_by_control(process, procs)
        if process.is_local:
            self._watch_by_kernel(process)

    def _watch_by_kernel(self, process: ProcessId) -> None:
        if process in self._fds:
            return
        loop = asyncio.get_running_loop()
        try:
            fd = os.pidfd_open(process.pid)
        except ProcessLookupError:
            loop.call_soon(self._on_death, process)
            return
        if not process.is_alive():  # another process got the id before the pidfd was opened
            os.close(fd)
            loop.call_soon(self._on_death, process)
            return
        self._fds[process] = fd
        loop.add_reader(fd, self._report, process)

    def _watch_by_control(self, process: ProcessId, procs: ProcMesh) -> None:
        member = procs.root_members[0].id  # a process that leaves the job and joins it again has another one
        known = self._members.setdefault(process, set())
        if member in known:
            return
        known.add(member)
        loop = asyncio.get_running_loop()

        def ended(_: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._ended, process, member)

        procs.ended.add_done_callback(ended)

    def _ended(self, process: ProcessId, member: str) -> None:
        if member in self._members.get(process, ()):
            self._report(process)

    def _report(self, process: ProcessId) -> None:
        self._forget(process)
        self._on_death(process)

    def _forget(self, process: ProcessId) -> None:
        self._members.pop(process, None)
        if (fd := self._fds.pop(process, None)) is not None:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)

    def close(self) -> None:
        """Stop watching; call it in the same event loop."""
        for process in [*self._fds, *self._members]:
            self._forget(process)
