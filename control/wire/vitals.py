"""What the operating system says of another process of this host: whether it runs, is stopped, or has ended.

A process that is short of CPU time, or in which one thread holds the interpreter lock, is silent for long although it
is well. The kernel knows better.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

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
class Thread:
    """What a thread has had of the CPUs in its life.

    Attributes:
        is_runnable: whether it runs, or would if there were a CPU for it.
        ran_ns: for how long it has run.
        waited_ns: for how long it has waited for a CPU, up to when it last got one.
        is_in_kernel: whether it waits there for something that no signal interrupts, as for memory from a disk.
    """

    is_runnable: bool = False
    ran_ns: int = 0
    waited_ns: int = 0
    is_in_kernel: bool = False


_NEW = Thread()


@dataclass(frozen=True, slots=True)
class Vitals:
    """How a process was when it was looked at.

    Attributes:
        condition: as the kernel says.
        state: the letter that stands for it in ``ps``; empty where it is not known.
        cpu_s: the CPU time that it has used in its life.
        threads: its threads, by their ids; empty where the kernel does not tell.
    """

    condition: Condition
    state: str = ""
    cpu_s: float = 0.0
    threads: Mapping[int, Thread] = field(default_factory=dict)

    def waited_s(self, before: Vitals) -> float:
        """How long it has been kept from running since an earlier look: that of its threads that was kept longest."""
        grown = (thread.waited_ns - before.threads.get(tid, _NEW).waited_ns for tid, thread in self.threads.items())
        return max(grown, default=0) / 1e9

    def ran_s(self, before: Vitals) -> dict[int, float]:
        """For how long each thread has run since an earlier look, by its id."""
        then = before.threads
        return {tid: (thread.ran_ns - then.get(tid, _NEW).ran_ns) / 1e9 for tid, thread in self.threads.items()}

    def is_kept_waiting(self, before: Vitals) -> bool:
        """Whether a thread wants to run and has not since an earlier look: its wait is not counted yet."""
        return any(
            thread.is_runnable and thread.ran_ns == before.threads.get(tid, _NEW).ran_ns
            for tid, thread in self.threads.items()
        )


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
    if state in _ENDED:
        return Vitals(Condition.ENDED, state, cpu_s)
    return Vitals(Condition.ALIVE, state, cpu_s, _threads_of(pid))


def _threads_of(pid: int) -> dict[int, Thread]:
    threads: dict[int, Thread] = {}
    try:
        for tid in map(int, os.listdir(f"/proc/{pid}/task")):
            threads[tid] = _thread(f"/proc/{pid}/task/{tid}")
    except (OSError, ValueError, IndexError):  # it ends, or this kernel does not count
        return threads
    return threads


def _thread(folder: str) -> Thread:
    with open(f"{folder}/schedstat", "rb") as file:
        ran, waited = file.read().split()[:2]
    with open(f"{folder}/stat", "rb") as file:
        state = file.read().rpartition(b")")[2].split()[_STATE]
    return Thread(state == b"R", int(ran), int(waited), state == b"D")


def _existence(pid: int) -> Condition:
    """Whether there is a process, where its state cannot be read: /proc may hide it, or be another's."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return Condition.ENDED
    except OSError:
        return Condition.UNKNOWN
    return Condition.UNKNOWN
