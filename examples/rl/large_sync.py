"""The same kind of sync with a model of 1 GB: there the bytes take the time, and not the messages beside them."""

from __future__ import annotations

from dataclasses import replace

from rich.table import Table

from skipper.benchmarks.machine import available_nbytes
from skipper.benchmarks.output import significant
from skipper.benchmarks.report import Result
from skipper.benchmarks.weight_sync.command import USUAL
from skipper.benchmarks.weight_sync.job import run
from skipper.benchmarks.weight_sync.progress import SyncProgress

WORKLOAD = replace(USUAL, modes=("direct",), only_syncs=True, iterations=5)
"""Two trainers and one engine of two tensor-parallel processes; 494 million parameters in bfloat16."""

_SPARE_NBYTES = 2 << 30  # for what the processes take besides: each of the four imports torch


def obstacle() -> str | None:
    """Why this machine cannot do it; None where it can."""
    needed, room = WORKLOAD.most_nbytes() + _SPARE_NBYTES, available_nbytes()
    if needed <= room:
        return None
    return f"it takes {needed / 1e9:.1f} GB of memory, and {room / 1e9:.1f} GB are free here"


async def measure() -> Result:
    """Sync it some times in turns with a memcpy of as many bytes, and compare what has arrived.

    Returns:
        The seconds of each sync, beside those of the copies.

    Raises:
        IntegrityError: Wrong bytes have arrived.
        ControlError: A process was lost.
    """
    rows = [row async for row in run(WORKLOAD, SyncProgress())]
    return next(row for row in rows if row.name == "sync_direct")


def table(row: Result) -> Table:
    """The figures for people."""
    assert row.reference is not None  # see `measure`
    nbytes = int(str(row.parameters["nbytes"]))
    memcpy_s = row.reference.value
    shown = Table(title="The same with a model of 1 GB", show_header=False)
    shown.add_row("parameters", f"{WORKLOAD.model.numel():,}")
    shown.add_row("bytes synced", f"{nbytes:,} in each of {row.n} syncs")
    shown.add_row("sync, publish to last generator", f"{row.value * 1e3:.0f} ms (p99 {row.p99 * 1e3:.0f})")
    shown.add_row("rate", f"{significant(nbytes / row.value / 1e9, 3)} GB/s")
    shown.add_row("memcpy, one thread", f"{memcpy_s * 1e3:.0f} ms, {significant(nbytes / memcpy_s / 1e9, 3)} GB/s")
    shown.add_row("ratio to memcpy", significant(memcpy_s / row.value, 3))
    return shown
