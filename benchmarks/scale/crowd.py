"""Many processes of this host, each with two actors; as many as the user asks for, or as memory allows."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from skipper import control
from skipper.benchmarks.errors import BenchmarkError
from skipper.benchmarks.machine import available_nbytes, proc_nbytes
from skipper.control import Actor, ActorMesh, endpoint

__all__ = ["TIMEOUT_S", "Crowd", "Member", "gather_crowd"]

TIMEOUT_S = 600.0
"""Seconds; hundreds of processes take long to start on a few cores."""

_SHARE = 0.7
"""Share of the available memory that the processes may take; the rest is for their work and for other programs."""

_PROBES = 2


class Member(Actor):
    """An actor of the crowd."""

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
        """How many were counted since the last call of this endpoint."""
        noted, self._noted = self._noted, 0
        return noted

    @endpoint
    def meet(self, peers: ActorMesh[Any]) -> None:
        """Take a reference to actors, to all of which it may speak later."""
        self._peers = peers

    @endpoint
    def cpu_ns(self) -> int:
        """CPU time that this process has used."""
        return time.process_time_ns()

    @endpoint
    def spin_ns(self, wall_ns: int) -> int:
        """Keep a core busy for ``wall_ns``, and return the CPU time that this process got."""
        end, before = time.perf_counter_ns() + wall_ns, time.process_time_ns()
        while time.perf_counter_ns() < end:
            pass
        return time.process_time_ns() - before

    @endpoint
    def memory_nbytes(self) -> int:
        """Memory of this process; what it shares with others counts in proportion."""
        return proc_nbytes("/proc/self/smaps_rollup", "Pss")


@dataclass(frozen=True, slots=True)
class Crowd:
    """The processes of a run.

    Attributes:
        straight: Members that are called directly.
        by_tree: Other members, in the same processes, that are called down a tree.
        limit: Why there are not more processes.
        start_s: From the spawn until all have answered.
        memory_nbytes: Memory of one process; memory that it shares counts in proportion.
    """

    straight: ActorMesh[Member]
    by_tree: ActorMesh[Member]
    limit: str
    start_s: float
    memory_nbytes: int


@contextlib.contextmanager
def gather_crowd(most: int) -> Iterator[Crowd]:
    """Start at most ``most`` processes; they end with the block.

    Raises:
        BenchmarkError: There is not enough memory for 4 processes.
        ControlError: A process did not start.
    """
    before = control.configure()
    control.configure(connect_timeout_s=TIMEOUT_S, heartbeat_s=TIMEOUT_S, stop_timeout_s=TIMEOUT_S)
    try:
        nbytes = _memory_of_one()
        available = available_nbytes()
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
