"""The client's whole run: open, first use, then each size proved, timed and proved again; or an atomic operation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import numpy as np

from skipper import dataplane
from skipper.benchmarks.bandwidth import ceiling
from skipper.benchmarks.bandwidth.channel import MessageChannel
from skipper.benchmarks.bandwidth.integrity import SEEDS, directions, prove_after, prove_before
from skipper.benchmarks.bandwidth.memory import allocate
from skipper.benchmarks.bandwidth.messages import Workload
from skipper.benchmarks.bandwidth.options import Measure
from skipper.benchmarks.bandwidth.rows import first_use_row, percentiles_us, size_rows, wire_row
from skipper.benchmarks.bandwidth.side import FarSide, Side
from skipper.benchmarks.bandwidth.timing import Heartbeat, time_transfers
from skipper.benchmarks.errors import IntegrityError
from skipper.benchmarks.report import Reference, Result, Scalar
from skipper.benchmarks.statistics import Contestant, Samples, Schedule, interleave, percentile

__all__ = ["run"]

_ATOMICS = 1000
_ATOMICS_BLOCK = 100
_CHECKED = 100
_LOWEST_BYTE = 0 if sys.byteorder == "little" else 7


def run(
    channel: MessageChannel,
    workload: Workload,
    sizes: Sequence[int],
    *,
    measure: Measure,
    net_devices: str | None = None,
) -> Iterator[Result]:
    """Measure every size against the server at the other end of ``channel``.

    Args:
        channel: To the server.
        workload: What is done.
        sizes: Bytes of a buffer, one after another.
        measure: How.
        net_devices: As given to `side.configure`, to find the rate of the wire.

    Yields:
        Rows as they are finished: the first-use cost, then those of each size in the order given.

    Raises:
        PeerError: The server is lost, silent, or refuses.
        IntegrityError: With ``measure.check``: wrong bytes.
        DataplaneError: A transfer failed; see `dataplane.errors`.
    """
    far = FarSide(channel, workload)
    offer, handles = far.open()
    with closing(Side(workload, exposes=workload.bidirectional, transfers=True)) as near:
        scratch = allocate(workload.mem, workload.largest * workload.batch)
        connect_us = near.connect(handles)
        backend = near.backend
        if workload.bidirectional:
            descriptors, _ = near.expose()
            far.connect(descriptors)
        one_host = offer.boot_id == ceiling.boot_id()
        near_link = ceiling.link(backend, net_devices)
        wire = ceiling.wire_ceiling(backend, near_link, far.link(backend), one_host=one_host)
        yield first_use_row(workload, backend=backend, register_us=offer.register_us, connect_us=connect_us)
        if wire.gbit_per_s is not None:
            yield wire_row(wire, workload)

        if workload.atomic:
            yield _time_atomics(near, far, backend=backend, measure=measure)
            far.goodbye()
            return
        ways = directions(workload, near, far) if measure.check else []
        for index, size in enumerate(sizes):
            seed = SEEDS * index
            prove_before(ways, size, batch=workload.batch, seed=seed)
            kernel_copy = None
            address = near.local.address
            if backend == "ucx" and address is not None and not workload.bidirectional:
                kernel_copy = ceiling.kernel_copier(workload.op, offer, size, local=address)
            timed = time_transfers(near, far, size, measure=measure, scratch=scratch, kernel_copy=kernel_copy)
            prove_after(ways, size, seed=seed)
            yield from size_rows(
                timed, workload, backend=backend, wire=wire, latency=measure.latency, verified=measure.check
            )
        far.goodbye()


class _Counter:
    """A word of the server, which this end counts up by one atomic operation at a time."""

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


def _time_atomics(near: Side, far: FarSide, *, backend: str, measure: Measure) -> Result:
    """Time the workload's atomic operation, and a read of the same word to compare.

    Both go to the server and back once: the difference between their times is the price of an atomic operation.

    Args:
        near: This end, connected.
        far: The other, which exposes one word.
        backend: Which backend does it.
        measure: How often, and whether to check.

    Raises:
        IntegrityError: With ``measure.check``: an operation was lost, done twice, or is not noticed when it is wrong.
    """
    workload = far.workload
    counter = _Counter(near.remote(workload.largest), workload)
    if measure.check:
        _prove_atomics(counter, workload.op, lambda: far.corrupt("exposed", workload.largest, at=_LOWEST_BYTE))
    iterations = measure.iterations
    if iterations is None and measure.duration_s is None:
        iterations = _ATOMICS
    schedule = Schedule(
        iterations=iterations,
        duration_s=measure.duration_s,
        block=_ATOMICS_BLOCK,
        warmup=_ATOMICS_BLOCK if measure.warmup is None else measure.warmup,
    )
    contestants = [Contestant("atomic", counter.step), Contestant("read", counter.read)]
    samples = interleave(contestants, schedule, after_round=Heartbeat(far).beat)
    if measure.check:
        _prove_atomics(counter, workload.op, None)
    return _atomic_row(samples, workload, backend=backend, verified=measure.check)


def _prove_atomics(counter: _Counter, op: str, corrupt: Callable[[], None] | None) -> None:
    """Count up and check the word; then have the server change it, and check that the next operation shows it."""
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


def _atomic_row(samples: dict[str, Samples], workload: Workload, *, backend: str, verified: bool) -> Result:
    times_us, read_us = ([ns / 1e3 for ns in samples[name].kept_ns()] for name in ("atomic", "read"))
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
        **percentiles_us(times_us),
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
