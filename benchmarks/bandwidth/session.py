"""The client's whole run: open, first use, then each size proved, timed and proved again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing

from benchmarks.bandwidth import ceiling
from benchmarks.bandwidth.channel import Channel
from benchmarks.bandwidth.far_side import FarSide
from benchmarks.bandwidth.integrity import SEEDS, directions, prove_after, prove_before
from benchmarks.bandwidth.memory import allocate
from benchmarks.bandwidth.messages import Workload
from benchmarks.bandwidth.options import Measure
from benchmarks.bandwidth.rows import first_use_row, size_rows
from benchmarks.bandwidth.side import Side
from benchmarks.bandwidth.timing import time_transfers
from benchmarks.report import Result

__all__ = ["run"]


def run(channel: Channel, workload: Workload, sizes: Sequence[int], *, measure: Measure) -> Iterator[Result]:
    """Measure every size against the server at the other end of ``channel``.

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
        yield first_use_row(workload, backend=backend, register_us=offer.register_us, connect_us=connect_us)

        ways = directions(workload, near, far) if measure.check else []
        for index, size in enumerate(sizes):
            seed = SEEDS * index
            prove_before(ways, size, batch=workload.batch, seed=seed)
            kernel_copy = None
            if backend == "ucx" and scratch.address is not None and not workload.bidirectional:
                kernel_copy = ceiling.process_vm_reader(offer, size, into=scratch.address)
            timed = time_transfers(near, far, size, measure=measure, scratch=scratch, kernel_copy=kernel_copy)
            prove_after(ways, size, seed=seed)
            yield from size_rows(timed, workload, backend=backend, latency=measure.latency, verified=measure.check)
        far.goodbye()
