"""``--op fetch-add`` and ``--op compare-and-swap``: the time of an atomic operation, beside a read of the same word.

Both take one way there and one way back; what an atomic costs more is the price of being atomic.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np

from skipper import dataplane
from skipper.benchmarks.bandwidth.far_side import FarSide
from skipper.benchmarks.bandwidth.messages import Workload
from skipper.benchmarks.bandwidth.options import Measure
from skipper.benchmarks.bandwidth.side import Side
from skipper.benchmarks.bandwidth.timing import Heartbeat
from skipper.benchmarks.errors import IntegrityError
from skipper.benchmarks.report import Reference, Result, Scalar
from skipper.benchmarks.statistics import Contestant, Samples, Schedule, interleave, percentile

__all__ = ["Counter", "time_atomics"]

_ITERATIONS = 1000
_BLOCK = 100
_CHECKED = 100


class Counter:
    """A word of the server as this end counts it up, one atomic operation at a time."""

    def __init__(self, buffer: dataplane.RDMABuffer, workload: Workload) -> None:
        self._buffer = buffer
        self._swaps = workload.op == "compare-and-swap"
        self._timeout = workload.timeout_s
        self._word = np.zeros(1, np.uint64)
        self.value = self.read()

    def read(self) -> int:
        """The word, by a plain read."""
        self._buffer.read_into(self._word, timeout=self._timeout).get()
        return int(self._word[0])

    def step(self) -> int:
        """Count up by one; returns what the word held before."""
        if self._swaps:
            operation = self._buffer.compare_and_swap(self.value, self.value + 1, timeout=self._timeout)
        else:
            operation = self._buffer.fetch_add(1, timeout=self._timeout)
        before = operation.get()
        self.value = before + 1
        return before


def time_atomics(near: Side, far: FarSide, *, backend: str, measure: Measure) -> Result:
    """Time the workload's operation.

    Args:
        near: This end, connected.
        far: The other, which exposes one word.
        backend: Which backend does it.
        measure: How often, and whether to check.

    Raises:
        IntegrityError: With ``measure.check``: an operation was lost, done twice, or is not noticed when it is wrong.
    """
    workload = far.workload
    counter = Counter(near.remote(workload.largest), workload)
    if measure.check:
        _prove(counter, workload.op, lambda: far.corrupt("exposed", workload.largest, at=_LOWEST_BYTE))
    iterations = measure.iterations
    if iterations is None and measure.duration_s is None:
        iterations = _ITERATIONS
    schedule = Schedule(
        iterations=iterations,
        duration_s=measure.duration_s,
        block=_BLOCK,
        warmup=_BLOCK if measure.warmup is None else measure.warmup,
    )
    contestants = [Contestant("atomic", counter.step), Contestant("read", counter.read)]
    samples = interleave(contestants, schedule, after_round=Heartbeat(far).beat)
    if measure.check:
        _prove(counter, workload.op, None)
    return _row(samples, workload, backend=backend, verified=measure.check)


_LOWEST_BYTE = 0 if sys.byteorder == "little" else 7


def _prove(counter: Counter, op: str, corrupt: Callable[[], None] | None) -> None:
    """Count, look, and count again on a word that another hand has changed."""
    begin = counter.read()
    counter.value = begin
    for expected in range(begin, begin + _CHECKED):
        before = counter.step()
        if before != expected:
            raise IntegrityError(f"{op}: the word held {before} in place of {expected}")
    if counter.read() != begin + _CHECKED:
        raise IntegrityError(f"{op}: the word is {counter.read()} after {_CHECKED} operations on {begin}")
    if corrupt is not None:
        expected = counter.value
        corrupt()
        if counter.step() == expected:
            raise IntegrityError(f"{op}: the word was changed on purpose, unnoticed by the check")


def _row(samples: dict[str, Samples], workload: Workload, *, backend: str, verified: bool) -> Result:
    times_us, read_us = ([ns / 1e3 for ns in samples[name].kept_ns()] for name in ("atomic", "read"))
    ordered = sorted(times_us)
    parameters: dict[str, Scalar] = {
        "op": workload.op,
        "nbytes": workload.largest,
        "size": workload.largest,
        "batch": 1,
        "mem": workload.mem,
        "bidirectional": False,
        "pairs": 1,
        "backend": backend,
        "verified": verified,
        "p50_us": percentile(ordered, 50),
        "p99_us": percentile(ordered, 99),
        "p99_9_us": percentile(ordered, 99.9),
        "operations_per_s": 1e9 * samples["atomic"].count / max(samples["atomic"].total_ns, 1),
    }
    return Result.from_samples(
        f"{workload.op.replace('-', '_')}_latency",
        "us",
        times_us,
        n=samples["atomic"].count,
        reference=Reference("read of the word", percentile(sorted(read_us), 50)),
        parameters=parameters,
    )
