"""The client's whole run: open, first use, then each size proved, timed and proved again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing

from skipper.benchmarks.bandwidth import ceiling
from skipper.benchmarks.bandwidth.atomics import time_atomics
from skipper.benchmarks.bandwidth.channel import MessageChannel
from skipper.benchmarks.bandwidth.far_side import FarSide
from skipper.benchmarks.bandwidth.integrity import SEEDS, directions, prove_after, prove_before
from skipper.benchmarks.bandwidth.memory import allocate
from skipper.benchmarks.bandwidth.messages import Workload
from skipper.benchmarks.bandwidth.options import Measure
from skipper.benchmarks.bandwidth.rows import first_use_row, size_rows, wire_row
from skipper.benchmarks.bandwidth.side import Side
from skipper.benchmarks.bandwidth.timing import time_transfers
from skipper.benchmarks.bandwidth.wire import ceiling as wire_ceiling
from skipper.benchmarks.bandwidth.wire import link
from skipper.benchmarks.report import Result

__all__ = ["run"]


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
        net_devices: What `side.configure` was told, to find the rate of the wire.

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
        wire = wire_ceiling(backend, link(backend, net_devices), far.link(backend), one_host=one_host)
        yield first_use_row(workload, backend=backend, register_us=offer.register_us, connect_us=connect_us)
        if wire.gbit_per_s is not None:
            yield wire_row(wire, workload)

        if workload.atomic:
            yield time_atomics(near, far, backend=backend, measure=measure)
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
