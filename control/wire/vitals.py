"""What the operating system says of another process of this host: whether it runs, is stopped, or has ended.

A process that is short of CPU time, or in which one thread keeps the interpreter lock from all others, says nothing for
long and is well. The kernel knows better than silence does.
"""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass

_STOPPED = frozenset("tT")
_ENDED = frozenset("ZXx")
_STATE, _UTIME, _STIME = 0, 11, 12
"""Fields behind the name of the program in /proc/PID/stat: proc(5), less three."""


class Condition(enum.Enum):
    """How a process is."""

    ALIVE = "alive"
    STOPPED = "stopped"
    ENDED = "ended"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Vitals:
    """How a process was when it was looked at.

    Attributes:
        condition: as the kernel says.
        state: the letter that stands for it in ``ps``; empty where it is not known.
        cpu_s: the CPU time that it has used in its life.
    """

    condition: Condition
    state: str = ""
    cpu_s: float = 0.0


def own_namespace() -> int:
    """The namespace of this process in which process ids have a meaning; 0 where that cannot be known."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino & 0xFFFF_FFFF
    except OSError:
        return 0


def look_at(pid: int) -> Vitals:
    """How the process with this id is, in the namespace of this process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        state = fields[_STATE].decode()
        cpu_s = (int(fields[_UTIME]) + int(fields[_STIME])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return Vitals(_existence(pid))
    if state in _STOPPED:
        return Vitals(Condition.STOPPED, state, cpu_s)
    return Vitals(Condition.ENDED if state in _ENDED else Condition.ALIVE, state, cpu_s)


def _existence(pid: int) -> Condition:
    """Whether there is a process, where its state cannot be read: /proc may hide it, or be another's."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return Condition.ENDED
    except OSError:
        return Condition.UNKNOWN
    return Condition.UNKNOWN
