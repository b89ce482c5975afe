"""What the operating system says about another process of this host: whether it runs, is stopped, or has ended.

A process that lacks CPU time, or in which one thread holds the interpreter lock, can be silent for a long time although
it works. The kernel knows that.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

_STOPPED = frozenset("tT")
_ENDED = frozenset("ZXx")
_STATE, _UTIME, _STIME = 0, 11, 12
"""Fields after the program name in /proc/PID/stat: the numbers of proc(5), minus three."""


class Condition(enum.Enum):
    """The condition of a process."""

    ALIVE = "alive"
    STOPPED = "stopped"
    ENDED = "ended"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Thread:
    """The CPU time of a thread during its life.

    Attributes:
        is_runnable: whether it runs, or would run if a CPU were free.
        ran_ns: how long it has run.
        waited_ns: how long it has waited for a CPU, until it last got one.
        is_in_kernel: whether it waits there uninterruptibly, for example for memory from a disk.
    """

    is_runnable: bool = False
    ran_ns: int = 0
    waited_ns: int = 0
    is_in_kernel: bool = False


_NEW = Thread()


@dataclass(frozen=True, slots=True)
class Vitals:
    """The state of a process at one moment.

    Attributes:
        condition: from the kernel.
        state: its letter in ``ps``; empty if unknown.
        cpu_s: the CPU time that it has used in its life.
        threads: its threads, by their ids; empty if the kernel does not report them.
    """

    condition: Condition
    state: str = ""
    cpu_s: float = 0.0
    threads: Mapping[int, Thread] = field(default_factory=dict)

    def waited_s(self, before: Vitals) -> float:
        """How long it was kept from running since an earlier look: the maximum over its threads."""
        grown = (thread.waited_ns - before.threads.get(tid, _NEW).waited_ns for tid, thread in self.threads.items())
        return max(grown, default=0) / 1e9

    def ran_s(self, before: Vitals) -> dict[int, float]:
        """How long each thread has run since an earlier look, by its id."""
        then = before.threads
        return {tid: (thread.ran_ns - then.get(tid, _NEW).ran_ns) / 1e9 for tid, thread in self.threads.items()}

    def is_kept_waiting(self, before: Vitals) -> bool:
        """Whether a thread is runnable but has not run since an earlier look: its wait is not counted yet."""
        return any(
            thread.is_runnable and thread.ran_ns == before.threads.get(tid, _NEW).ran_ns
            for tid, thread in self.threads.items()
        )


def own_namespace() -> int:
    """The pid namespace of this process; 0 if it cannot be known."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino & 0xFFFF_FFFF
    except OSError:
        return 0


def look_at(pid: int) -> Vitals:
    """The state of the process with this id, in the namespace of this process."""
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
    except (OSError, ValueError, IndexError):  # the thread ends, or this kernel does not count
        return threads
    return threads


def _thread(folder: str) -> Thread:
    with open(f"{folder}/schedstat", "rb") as file:
        ran, waited = file.read().split()[:2]
    with open(f"{folder}/stat", "rb") as file:
        state = file.read().rpartition(b")")[2].split()[_STATE]
    return Thread(state == b"R", int(ran), int(waited), state == b"D")


def _existence(pid: int) -> Condition:
    """Whether a process exists if its state cannot be read: /proc may hide it, or belong to another namespace."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return Condition.ENDED
    except OSError:
        return Condition.UNKNOWN
    return Condition.UNKNOWN
