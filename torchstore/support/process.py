"""Which process: an identity that a reused process id does not fake."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache

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
        """Whether its pid means something here."""
        return self.host == _host()

    def is_alive(self) -> bool:
        """Whether it still runs; a process of another host counts as alive."""
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
    # The command name may hold spaces and brackets: fields count from after the last bracket.
    state, *fields = stat[stat.rindex(b")") + 2 :].split()
    return None if state in (b"Z", b"X") else int(fields[18])
