"""How every benchmark here measures: warm, interleaved, and by order statistics.

A figure of a shared machine says little. The ratio of two figures says much, provided that the load of the machine was
the same for both. So the things to be compared take turns within one run (`interleave`), each is warmed first, and the
report has a percentile that was really observed (nearest rank), not a mean, which a single interruption can move.

Pure: no I/O, no threads, no third-party imports. Durations are whole nanoseconds.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Generic, TypeVar

__all__ = [
    "Contestant",
    "Samples",
    "Schedule",
    "Summary",
    "WholeRounds",
    "interleave",
    "median_interval",
    "percentile",
    "stretches",
    "summarize",
    "time_runs",
    "timed",
]

Clock = Callable[[], int]
Number = TypeVar("Number", int, float)


def percentile(ordered: Sequence[float], rank: float) -> float:
    """The nearest-rank percentile: the smallest sample that at least ``rank`` percent do not exceed.

    Args:
        ordered: Samples in ascending order, at least one.
        rank: 0 < rank <= 100. ``99.9`` means exactly that; binary rounding does not shift the rank.

    Returns:
        One of the samples. With fewer than ``100 / (100 - rank)`` of them it is the largest.

    Raises:
        ValueError: No samples, or ``rank`` out of range.
    """
    if not ordered:
        raise ValueError("a percentile of no samples is undefined")
    if not 0 < rank <= 100:
        raise ValueError(f"a percentile's rank must be in (0, 100], not {rank}")
    # str() gives the shortest decimal that means this float, so 99.9 becomes 999/1000 and not a hair more,
    # which would push an exact rank (the 999th of 1000) up by one.
    return ordered[math.ceil(Fraction(str(rank)) * len(ordered) / 100) - 1]


STRETCHES = 32


def stretches(samples: Sequence[float]) -> list[float]:
    """Medians of consecutive stretches of the samples, at most `STRETCHES` of them.

    Neighbouring samples were taken under the same load, so they are not independent; stretches of a run are closer to
    that. If two contestants took turns, their stretches of the same number were measured side by side.
    """
    count = min(STRETCHES, len(samples))
    cuts = [len(samples) * i // count for i in range(count + 1)] if count else []
    return [percentile(sorted(samples[begin:end]), 50) for begin, end in pairwise(cuts)]


def median_interval(samples: Sequence[float], *, confidence: float = 0.95) -> tuple[float, float] | None:
    """A confidence interval of the median, by ranks: it assumes nothing about how the samples are distributed.

    Args:
        samples: Independent samples, in any order.
        confidence: Probability that the true median is within.

    Returns:
        Two of the samples, the k-th smallest and the k-th largest, k as large as the binomial distribution of the
        number of samples below the median allows; ``None`` where not even the extremes do (5 samples at 0.95).
    """
    ordered = sorted(samples)
    tail, allowed = 0, (1 - confidence) / 2 * 2 ** len(ordered)
    for below in range(len(ordered)):
        tail += math.comb(len(ordered), below)
        if tail > allowed:
            return None if below == 0 else (ordered[below - 1], ordered[-below])
    return None


@dataclass(frozen=True, slots=True)
class Summary:
    """Order statistics of one set of samples, in their own unit; ``p50`` is the median."""

    n: int
    min: float
    p50: float
    p99: float
    p99_9: float
    max: float


def summarize(samples: Sequence[float]) -> Summary:
    """Summarize samples given in any order.

    Raises:
        ValueError: No samples.
    """
    ordered = sorted(samples)
    if not ordered:
        raise ValueError("no samples to summarize")
    return Summary(
        n=len(ordered),
        min=ordered[0],
        p50=percentile(ordered, 50),
        p99=percentile(ordered, 99),
        p99_9=percentile(ordered, 99.9),
        max=ordered[-1],
    )


class Samples:
    """Durations in nanoseconds, in bounded memory however long the run.

    Count, sum and extremes are exact. Percentiles come from every sample until ``limit`` of them are
    kept, then from every second, every fourth, ...: evenly spaced over the run, so slow drift stays in.
    """

    __slots__ = ("_kept", "_limit", "_stride", "count", "max_ns", "min_ns", "total_ns")

    def __init__(self, *, limit: int = 1 << 18) -> None:
        if limit < 2:
            raise ValueError(f"percentiles need room for at least 2 samples, not {limit}")
        self._kept = array("q")
        self._limit = limit
        self._stride = 1
        self.count = 0
        self.total_ns = 0
        self.min_ns = 0
        self.max_ns = 0

    def extend(self, durations_ns: Sequence[int]) -> None:
        """Add durations in the order in which they were taken."""
        if not durations_ns:
            return
        self.min_ns = min(min(durations_ns), self.min_ns if self.count else durations_ns[0])
        self.max_ns = max(max(durations_ns), self.max_ns)
        self.total_ns += sum(durations_ns)
        self._kept.extend(durations_ns[-self.count % self._stride :: self._stride])
        self.count += len(durations_ns)
        while len(self._kept) > self._limit:
            del self._kept[1::2]
            self._stride *= 2

    def kept_ns(self) -> list[int]:
        """The samples that percentiles are taken from, in the order in which they were taken."""
        return list(self._kept)


@dataclass(frozen=True, slots=True)
class Contestant:
    """One of the things that take turns: its name, and a call that does it once, to its end."""

    name: str
    run: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Schedule:
    """How often each contestant runs.

    Attributes:
        iterations: Timed runs of each contestant; ``None`` leaves it to ``duration_s``.
        duration_s: Measure whole rounds until this much time has passed; ``None`` leaves it to ``iterations``. With
            both, the limit that is reached first ends the measurement.
        block: Timed runs of one contestant in a row before the next has its turn. A block of more than
            one begins with one run that is not timed: it brings the contestant's own memory back into
            the caches, where the others have just been. Choose 1 for what no cache can hold.
        warmup: Runs of each contestant before the first timed one.
    """

    iterations: int | None = None
    duration_s: float | None = None
    block: int = 1
    warmup: int = 1

    def __post_init__(self) -> None:
        if self.iterations is None and self.duration_s is None:
            raise ValueError("a schedule needs iterations or a duration, or it would never end")
        if self.iterations is not None and self.iterations < 1:
            raise ValueError(f"at least one iteration is needed, not {self.iterations}")
        if self.duration_s is not None and not self.duration_s > 0:
            raise ValueError(f"the duration must be positive, not {self.duration_s}")
        if self.block < 1:
            raise ValueError(f"a block has at least one run, not {self.block}")
        if self.warmup < 0:
            raise ValueError(f"there cannot be {self.warmup} warm-up runs")


def interleave(
    contestants: Sequence[Contestant],
    schedule: Schedule,
    *,
    clock: Clock = time.perf_counter_ns,
    after_round: Callable[[], None] | None = None,
) -> dict[str, Samples]:
    """Run the contestants in turns, and time each run.

    A round gives every contestant one block. A different contestant begins each round, so that none always follows the
    same neighbour. All contestants get the same number of timed runs.

    Args:
        contestants: At least one, with names that differ.
        schedule: How often each runs.
        clock: Monotonic time in ns; tests pass their own.
        after_round: Called between rounds, outside anything timed, and after the warm-up.

    Returns:
        The timed samples of each contestant, by name.

    Raises:
        ValueError: No contestants, or two of one name. What a contestant raises passes through.
    """
    samples = {contestant.name: Samples() for contestant in contestants}
    if not contestants or len(samples) != len(contestants):
        raise ValueError("interleaving needs contestants, each with a name of its own")
    for contestant in contestants:
        for _ in range(schedule.warmup):
            contestant.run()
    if after_round is not None:
        after_round()

    begin_ns = clock()
    done = 0
    turn = 0
    while not _finished(schedule, done, clock() - begin_ns):
        left = schedule.block if schedule.iterations is None else schedule.iterations - done
        runs = min(schedule.block, left)
        for position in range(len(contestants)):
            contestant = contestants[(turn + position) % len(contestants)]
            if schedule.block > 1:
                contestant.run()
            samples[contestant.name].extend(time_runs(contestant.run, runs, clock=clock))
        done += runs
        turn += 1
        if after_round is not None:
            after_round()
    return samples


def _finished(schedule: Schedule, done: int, elapsed_ns: int) -> bool:
    if done == 0:
        return False
    if schedule.iterations is not None and done >= schedule.iterations:
        return True
    return schedule.duration_s is not None and elapsed_ns >= schedule.duration_s * 1e9


class WholeRounds(Generic[Number]):
    """Figures that count once their round is complete: none of the warm-up or of a round that was interrupted.

    Blocks `note` what they take, and `end_round` is the ``after_round`` of `interleave`.

    Args:
        kept: Gets the figures of each whole round, by what they are of.
        on_round: Called with the number of whole rounds after each.
    """

    def __init__(self, kept: dict[str, list[Number]], on_round: Callable[[int], None] | None = None) -> None:
        self._kept: dict[str, list[Number]] = kept
        self._on_round = on_round
        self._whole = 0
        self._taken: dict[str, list[Number]] = {}
        self._is_warm = False

    def note(self, name: str, figures: Iterable[Number]) -> None:
        """Add figures of the current round."""
        self._taken.setdefault(name, []).extend(figures)

    def end_round(self) -> None:
        """Keep what was taken since the last call; the first call ends the warm-up."""
        if self._is_warm:
            for name, figures in self._taken.items():
                self._kept.setdefault(name, []).extend(figures)
            self._whole += 1
            if self._on_round is not None:
                self._on_round(self._whole)
        self._taken = {}
        self._is_warm = True


def timed(action: Callable[[], object]) -> int:
    """How long ``action`` takes, in ns."""
    begin_ns = time.perf_counter_ns()
    action()
    return time.perf_counter_ns() - begin_ns


def time_runs(run: Callable[[], object], runs: int, *, clock: Clock = time.perf_counter_ns) -> list[int]:
    """Durations of ``runs`` calls of ``run``, one after another, in ns."""
    durations: list[int] = []
    for _ in range(runs):
        begin_ns = clock()
        run()
        durations.append(clock() - begin_ns)
    return durations
