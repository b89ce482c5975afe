"""Calls and broadcasts to more and more processes, straight and by tree, in turns; and the model's costs from them."""

from __future__ import annotations

import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns

from skipper import control
from skipper.benchmarks.errors import BenchmarkError
from skipper.benchmarks.scale.crowd import TIMEOUT_S, Crowd, Member
from skipper.benchmarks.scale.model import Costs
from skipper.benchmarks.statistics import Contestant, Schedule, interleave, percentile, time_runs, timed
from skipper.control import ActorMesh
from skipper.control.runtime.cast.tree import Tree

__all__ = ["WAYS", "ScalePlan", "Times", "costs_of", "measure", "sizes"]

WAYS = ("straight", "tree")
_SPINNERS = 8
_SPIN_NS = 30_000_000
_NEVER = 1 << 40
"""A threshold for trees that no mesh exceeds."""


@dataclass(frozen=True, slots=True)
class ScalePlan:
    """How much is measured.

    Attributes:
        procs: The most processes.
        fanout: Fan-out of the trees.
        rounds: Blocks of each kind and size.
        calls: Calls in a block.
        broadcasts: Messages to each rank in a block.
        turns: Calls to each rank alone in a block.
        message_nbytes: Size of the message that every call sends and returns.
    """

    procs: int
    fanout: int = 8
    rounds: int = 12
    calls: int = 8
    broadcasts: int = 100
    turns: int = 4
    message_nbytes: int = 100


@dataclass(slots=True)
class Times:
    """What was measured, by way and number of ranks.

    Attributes:
        calls: Durations of calls in ns.
        broadcasts: Durations of blocks of broadcasts in ns.
        caster_cpu: CPU time of one call in the caster's process, in ns of a core.
        member_cpu: CPU time of one call in a rank's process, in ns of a core, called straight and one rank at a time;
            by the number of ranks that were called so.
        one: Durations of these calls in ns, by the same numbers.
        cores: How many cores the processes got when all of them wanted one; other programs may have used the rest.
        ends: How often `end_round` was called.
    """

    calls: dict[tuple[str, int], list[int]] = field(default_factory=lambda: defaultdict(list))
    broadcasts: dict[tuple[str, int], list[int]] = field(default_factory=lambda: defaultdict(list))
    caster_cpu: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    member_cpu: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    one: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    cores: list[float] = field(default_factory=list)
    ends: int = 0

    def end_round(self) -> None:
        """Called before the first round, and after each."""
        self.ends += 1

    @property
    def is_whole(self) -> bool:
        """Whether a round is complete: there are figures of each kind."""
        return self.ends > 1


def sizes(procs: int) -> list[int]:
    """4, 8, 16, ... and the number of processes itself."""
    return [*(1 << power for power in range(2, procs.bit_length()) if 1 << power < procs), procs]


def measure(crowd: Crowd, plan: ScalePlan, times: Times, on_round: Callable[[int], None] | None = None) -> None:
    """Run the plan.

    Args:
        crowd: The processes.
        plan: How much is measured.
        times: Gets what was measured.
        on_round: Called with the number of rounds after each.

    Raises:
        BenchmarkError: A message was lost.
        ControlError: A call failed.
    """
    blocks = [Contestant("cores", functools.partial(_spin, crowd, times))]
    for count in sizes(crowd.straight.size):
        part = slice(0, count)
        some = crowd.straight.slice(ranks=part)
        blocks.append(Contestant(f"in turn {count}", functools.partial(_call_in_turn, some, plan, times)))
        for way, mesh in (("straight", crowd.straight), ("tree", crowd.by_tree)):
            members = mesh.slice(ranks=part)
            blocks.append(Contestant(f"call {way} {count}", functools.partial(_calls, way, members, plan, times)))
            blocks.append(
                Contestant(f"broadcast {way} {count}", functools.partial(_broadcasts, way, members, plan, times))
            )

    def end_round() -> None:
        times.end_round()
        if times.is_whole and on_round is not None:
            on_round(times.ends - 1)

    interleave(blocks, Schedule(iterations=plan.rounds, warmup=0), after_round=end_round)


def _go(way: str, plan: ScalePlan) -> None:
    control.configure(tree_threshold=_NEVER if way == "straight" else 1, tree_fanout=plan.fanout)


def _call_in_turn(members: ActorMesh[Member], plan: ScalePlan, times: Times) -> None:
    """Call one rank after another, and measure what a call costs a rank.

    No rank is called twice in a row: between two calls of a process the other processes evict its data from the
    caches, as they do in a call to all. How much they evict depends on how many they are, so every size of the real
    runs has its own cost: among a hundred ranks a call costs a rank several times what it costs among four.
    """
    message, count = bytes(plan.message_nbytes), members.size
    each = [members.slice(ranks=rank) for rank in range(count)]
    before = members.cpu_ns.call().get(TIMEOUT_S)
    for _ in range(plan.turns):
        times.one[count] += [timed(functools.partial(_ask, member, message)) for member in each]
    after = members.cpu_ns.call().get(TIMEOUT_S)
    # Each of the two questions is itself a call, and one of these calls is between the two readings.
    times.member_cpu[count] += [(after[rank] - before[rank]) / (plan.turns + 1) for rank in range(count)]


def _ask(member: ActorMesh[Member], message: bytes) -> None:
    member.echo.call_one(message).get(TIMEOUT_S)


def _spin(crowd: Crowd, times: Times) -> None:
    """Measure how many cores the processes can get."""
    some = crowd.straight.slice(ranks=slice(0, min(_SPINNERS, crowd.straight.size)))
    begin = perf_counter_ns()
    used = some.spin_ns.call(_SPIN_NS).get(TIMEOUT_S)
    times.cores.append(sum(used) / (perf_counter_ns() - begin))


def _calls(way: str, members: ActorMesh[Member], plan: ScalePlan, times: Times) -> None:
    _go(way, plan)
    message = bytes(plan.message_nbytes)

    def call() -> None:
        members.echo.call(message).get(TIMEOUT_S)

    call()  # the first call after `_go` also puts messages of the two ways in order
    before = time.process_time_ns()
    times.calls[way, members.size] += time_runs(call, plan.calls)
    times.caster_cpu[way, members.size].append((time.process_time_ns() - before) / plan.calls)


def _broadcasts(way: str, members: ActorMesh[Member], plan: ScalePlan, times: Times) -> None:
    _go(way, plan)
    message = bytes(plan.message_nbytes)
    members.noted.call().get(TIMEOUT_S)
    begin = perf_counter_ns()
    for _ in range(plan.broadcasts):
        members.note.broadcast(message)
    noted = members.noted.call().get(TIMEOUT_S)  # the answer comes after them: all have been handled
    elapsed = perf_counter_ns() - begin
    if any(count != plan.broadcasts for count in noted):
        raise BenchmarkError(f"of {plan.broadcasts} broadcasts to {members.size} ranks, {min(noted)} came to some")
    times.broadcasts[way, members.size].append(elapsed)


def costs_of(times: Times, plan: ScalePlan) -> dict[int, Costs]:
    """The model's costs, by number of ranks: from CPU times, and from calls to one rank.

    The caster's CPU time grows with the number of messages and with the number of results. Straight, the two numbers
    are equal, and by tree they differ: so the two costs can be separated. Latencies of calls to many are not used.
    """
    cpu_us = {key: statistics.median(values) / 1e3 for key, values in times.caster_cpu.items()}
    straight = [(count, cpu_us[way, count]) for way, count in cpu_us if way == "straight"]
    call_us, slope_us = _line(straight)
    pairs = []
    for way, count in cpu_us:
        if way == "tree":
            fewer = len(Tree(count, plan.fanout).heads) - count
            pairs.append((fewer, cpu_us[way, count] - call_us - slope_us * count))
    weight = sum(fewer * fewer for fewer, _ in pairs)
    message_us = sum(fewer * saved for fewer, saved in pairs) / weight if weight else slope_us
    message_us = min(max(message_us, 0.0), slope_us)
    costs = {}
    for count, used in times.member_cpu.items():
        handle_us, one_us = statistics.median(used) / 1e3, percentile(sorted(times.one[count]), 50) / 1e3
        wire_us = max(one_us - call_us - slope_us - handle_us, 0.0) / 2
        costs[count] = Costs(call_us, message_us, slope_us - message_us, handle_us, wire_us)
    return costs


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """A line through points that is nowhere below zero: its height at zero, and its slope."""
    if len(points) > 1:
        slope, height = statistics.linear_regression([x for x, _ in points], [y for _, y in points])
        if slope > 0 and height >= 0:
            return height, slope
    return 0.0, sum(x * y for x, y in points) / sum(x * x for x, _ in points)
