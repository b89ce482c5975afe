"""The timed part of one size: transfers and yardsticks in turns, and the samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from skipper.benchmarks.bandwidth.memory import Memory
from skipper.benchmarks.bandwidth.messages import Alive, tell
from skipper.benchmarks.bandwidth.options import Measure
from skipper.benchmarks.bandwidth.side import FarSide, Side
from skipper.benchmarks.statistics import Contestant, Samples, Schedule, interleave, percentile

__all__ = ["KERNEL", "MEMCPY", "ONE", "TRANSFER", "Heartbeat", "TimeSpan", "Timed", "Together", "time_transfers"]

TRANSFER, MEMCPY, KERNEL, ONE = "transfer", "memcpy", "kernel", "one transfer"

DEFAULT_BYTES = 8 << 30
"""Bytes that all timed transfers of a size move, unless that makes fewer than 20 or more than 1000 of them."""

BLOCK_BYTES = 16 << 20
"""About what the transfers of one block move: so little that contestants take turns often, and so much that a block of
small transfers takes long compared with the change of turns."""

_ALIVE_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Timed:
    """What was timed for one size.

    Attributes:
        size: Bytes of one buffer.
        transfers_per_run: Transfers that a sample of `TRANSFER` covers: 1, or, in both directions at
            once, those of one burst and one direction.
        bytes_per_run: What such a sample moved, both directions together.
        bytes_per_copy: What one sample of every yardstick moved.
        segments: Contiguous runs that one transfer consists of.
        samples: Durations by contestant.
    """

    size: int
    transfers_per_run: int
    bytes_per_run: int
    bytes_per_copy: int
    segments: int
    samples: dict[str, Samples]

    def nbytes(self, name: str) -> int:
        """Bytes that a sample of this contestant moved."""
        return self.bytes_per_run if name == TRANSFER else self.bytes_per_copy

    def rates(self, name: str) -> list[float]:
        """Bytes per ns, which is GB/s, of every kept sample."""
        return [self.nbytes(name) / max(duration, 1) for duration in self.samples[name].kept_ns()]

    def times_us(self, name: str) -> list[float]:
        """µs per transfer, or per copy, of every kept sample."""
        count = self.transfers_per_run if name == TRANSFER else 1
        return [duration / 1e3 / count for duration in self.samples[name].kept_ns()]


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """When a round really began and ended, and how long each of its runs took."""

    begin_ns: int
    end_ns: int
    durations_ns: list[int]


@dataclass(slots=True)
class Together:
    """What all pairs timed for one size, in rounds that all of them began at the same moment.

    Attributes:
        nbytes: Bytes of one run.
        rates: GB/s of all pairs together, a round each.
        pair_rates: For each pair its own GB/s, a round each.
        durations: Durations of single runs, all pairs mixed.
    """

    nbytes: int
    rates: list[float] = field(default_factory=list)
    pair_rates: list[list[float]] = field(default_factory=list)
    durations: Samples = field(default_factory=Samples)

    def add(self, spans: Sequence[TimeSpan]) -> None:
        """Add a round; each pair has given one span."""
        runs = len(spans[0].durations_ns)
        span_ns = max(span.end_ns for span in spans) - min(span.begin_ns for span in spans)
        self.rates.append(len(spans) * runs * self.nbytes / max(span_ns, 1))
        self.pair_rates = self.pair_rates or [[] for _ in spans]
        for rates, span in zip(self.pair_rates, spans, strict=True):
            rates.append(runs * self.nbytes / max(span.end_ns - span.begin_ns, 1))
            self.durations.extend(span.durations_ns)

    def medians(self) -> list[float]:
        """The median rate of each pair."""
        return [percentile(sorted(rates), 50) for rates in self.pair_rates]


class Heartbeat:
    """Tells the server about once a second that this side is at work, and never while something is timed."""

    def __init__(self, far: FarSide) -> None:
        self._far = far
        self._last = time.monotonic()

    def beat(self) -> None:
        """Send `Alive` if the last one is old enough."""
        now = time.monotonic()
        if now - self._last >= _ALIVE_EVERY_S:
            tell(self._far.channel, Alive())
            self._last = now


def time_transfers(
    near: Side,
    far: FarSide,
    size: int,
    *,
    measure: Measure,
    scratch: Memory,
    kernel_copy: Callable[[], object] | None,
) -> Timed:
    """Time transfers of ``size`` in turns with a memcpy of as many bytes.

    Args:
        near: This end, connected.
        far: The other.
        size: Bytes of each of the batch's buffers.
        measure: How often.
        scratch: Where the yardsticks copy to. The memcpy reads what the transfers use on this side, so
            both touch equally warm memory, and leaves it as it is.
        kernel_copy: A further yardstick, if there is one.
    """
    workload = far.workload
    total = size * workload.batch
    block = max(1, min(100, BLOCK_BYTES // total))
    iterations = measure.iterations
    if iterations is None and measure.duration_s is None:
        iterations = max(20, min(1000, DEFAULT_BYTES // total))
    warmup = max(2, block) if measure.warmup is None else measure.warmup
    burst = 1
    if workload.bidirectional:
        # A message starts the server's half: a burst must take much longer, and there should still be ten bursts.
        burst = block if iterations is None else max(1, min(block, iterations // 10))
        block = 1
        iterations = None if iterations is None else max(1, iterations // burst)
    transfer = _both_ways(near, far, size, burst) if workload.bidirectional else near.mover(size)

    contestants = [
        Contestant(TRANSFER, transfer),
        Contestant(MEMCPY, scratch.copier(near.local, total)),
    ]
    if kernel_copy is not None:
        contestants.append(Contestant(KERNEL, kernel_copy))
    if workload.beside_one:
        contestants.append(Contestant(ONE, near.together(size)))
    schedule = Schedule(iterations=iterations, duration_s=measure.duration_s, block=block, warmup=warmup)
    samples = interleave(contestants, schedule, after_round=Heartbeat(far).beat)
    both = 2 if workload.bidirectional else 1
    return Timed(
        size=size,
        transfers_per_run=burst,
        bytes_per_run=both * burst * total,
        bytes_per_copy=total,
        segments=near.segments(size),
        samples=samples,
    )


def _both_ways(near: Side, far: FarSide, size: int, burst: int) -> Callable[[], object]:
    """A call in which both ends transfer at once; it returns when both have finished."""

    def run() -> None:
        far.start_transfer(size, runs=burst)
        near.transfer(size, runs=burst)
        far.finish_transfer(runs=burst)

    return run
