"""Many processes of this host, each with a member; as many as asked for, or as memory allows."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from skipper import control
from skipper.benchmarks.errors import BenchmarkError
from skipper.control import Actor, ActorMesh, endpoint

__all__ = ["TIMEOUT_S", "Crowd", "Member", "gather_crowd"]

TIMEOUT_S = 600.0
"""Hundreds of processes that start on a few cores take their time."""

_SHARE = 0.7
"""Of the memory that is available; the rest is for those processes' work and for others."""

_PROBES = 2


class Member(Actor):
    """One of many."""

    def __init__(self) -> None:
        self._noted = 0

    @endpoint
    def echo(self, value: bytes) -> bytes:
        """Give it back."""
        return value

    @endpoint
    def note(self, value: bytes) -> None:
        """Count it."""
        self._noted += 1

    @endpoint
    def noted(self) -> int:
        """How many were counted since this was asked last."""
        noted, self._noted = self._noted, 0
        return noted

    @endpoint
    def cpu_ns(self) -> int:
        """What this process has used of the processors."""
        return time.process_time_ns()

    @endpoint
    def spin_ns(self, wall_ns: int) -> int:
        """Keep a core busy, and say how much of it this process got."""
        end, before = time.perf_counter_ns() + wall_ns, time.process_time_ns()
        while time.perf_counter_ns() < end:
            pass
        return time.process_time_ns() - before

    @endpoint
    def memory_nbytes(self) -> int:
        """What this process holds; of what it shares with others, its share."""
        return _proportional_nbytes()


@dataclass(frozen=True, slots=True)
class Crowd:
    """The processes of a run.

    Attributes:
        straight: members that are called straight.
        by_tree: others, in the same processes, that are called down a tree.
        limit: why there are not more.
        start_s: from the spawn to the first answers of all.
        memory_nbytes: of one process, what it shares counted by its share.
    """

    straight: ActorMesh[Member]
    by_tree: ActorMesh[Member]
    limit: str
    start_s: float
    memory_nbytes: int


@contextlib.contextmanager
def gather_crowd(most: int) -> Iterator[Crowd]:
    """Start processes, at most so many; they end with the block.

    Raises:
        BenchmarkError: memory does not allow for a handful.
        ControlError: a process did not start.
    """
    before = control.configure()
    control.configure(connect_timeout_s=TIMEOUT_S, heartbeat_s=TIMEOUT_S, stop_timeout_s=TIMEOUT_S)
    try:
        nbytes = _memory_of_one()
        available = _available_nbytes()
        allowed = int(_SHARE * available / nbytes)
        limit = "as many as asked for"
        if allowed < most:
            limit = f"memory: {_SHARE:.0%} of the {available >> 20} MiB available, {nbytes >> 20} MiB for each"
        if min(most, allowed) < 4:
            raise BenchmarkError(f"there is no room for 4 processes ({available >> 20} MiB are available)")
        begin = time.perf_counter()
        procs = control.this_host().spawn_procs({"ranks": min(most, allowed)})
        straight, by_tree = procs.spawn("straight", Member), procs.spawn("by_tree", Member)
        straight.initialized.get(TIMEOUT_S)
        by_tree.initialized.get(TIMEOUT_S)
        yield Crowd(straight, by_tree, limit, time.perf_counter() - begin, nbytes)
    finally:
        control.shutdown()
        control.configure(
            connect_timeout_s=before.connect_timeout_s,
            heartbeat_s=before.heartbeat_s,
            stop_timeout_s=before.stop_timeout_s,
        )


def _memory_of_one() -> int:
    procs = control.this_host().spawn_procs({"ranks": _PROBES})
    probes = procs.spawn("probes", Member)
    probes.echo.call(b"").get(TIMEOUT_S)
    nbytes: list[int] = probes.memory_nbytes.call().get(TIMEOUT_S).values()
    procs.stop().get(TIMEOUT_S)
    return max(nbytes)


def _proportional_nbytes() -> int:
    return _kilobytes("/proc/self/smaps_rollup", "Pss:") << 10


def _available_nbytes() -> int:
    return _kilobytes("/proc/meminfo", "MemAvailable:") << 10


def _kilobytes(path: str, key: str) -> int:
    for line in Path(path).read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1])
    raise BenchmarkError(f"{path} does not tell {key.rstrip(':')}")
