"""What was timed, as rows of a report."""

from __future__ import annotations

from benchmarks.bandwidth import ceiling
from benchmarks.bandwidth.messages import Workload
from benchmarks.bandwidth.timing import MEMCPY, TRANSFER, Timed
from benchmarks.report import Reference, Result, Scalar
from benchmarks.statistics import percentile

__all__ = ["first_use_row", "size_rows"]


def first_use_row(workload: Workload, *, backend: str, register_us: float, connect_us: float) -> Result:
    """The price of the very first transfer: registering at the server, and connecting to it."""
    parameters: dict[str, Scalar] = {
        "backend": backend,
        "op": workload.op,
        "mem": workload.mem,
        "batch": workload.batch,
        "registered_nbytes": workload.largest * workload.batch,
        "register_us": register_us,
        "connect_us": connect_us,
    }
    return Result.single("first_use", "us", register_us + connect_us, parameters=parameters)


def size_rows(timed: Timed, workload: Workload, *, backend: str, latency: bool, verified: bool) -> list[Result]:
    """The figures of one size: the transfers' row, then that of the kernel's own copy if it was timed.

    Args:
        timed: The samples.
        workload: What was done.
        backend: Which backend did it.
        latency: Give times in µs rather than rates in GB/s.
        verified: The data was checked.
    """
    kind = "latency" if latency else "bandwidth"
    unit = "us" if latency else "GB/s"
    values = {name: timed.times_us(name) if latency else timed.rates(name) for name in timed.samples}
    medians = {name: percentile(sorted(samples), 50) for name, samples in values.items()}

    def row(contestant: str, name: str, parameters: dict[str, Scalar]) -> Result:
        return Result.from_samples(
            f"{name}_{kind}",
            unit,
            values[contestant],
            n=timed.samples[contestant].count,
            reference=Reference("memcpy" if workload.mem == "host" else "device_copy", medians[MEMCPY]),
            parameters={
                "op": workload.op,
                "nbytes": timed.size * workload.batch,
                "size": timed.size,
                "batch": workload.batch,
                "mem": workload.mem,
                "bidirectional": workload.bidirectional,
                **parameters,
                **_speeds(timed, contestant),
            },
        )

    own: dict[str, Scalar] = {
        "backend": backend,
        "verified": verified,
        "transfers_per_sample": timed.transfers_per_run,
    }
    if ceiling.NAME not in medians:
        return [row(TRANSFER, workload.op, own)]
    own[f"ratio_to_{ceiling.NAME}"] = medians[TRANSFER] / medians[ceiling.NAME]
    return [row(TRANSFER, workload.op, own), row(ceiling.NAME, ceiling.NAME, {"backend": "kernel"})]


def _speeds(timed: Timed, contestant: str) -> dict[str, Scalar]:
    """The figures in the units that the row itself is not in; the table shows them all."""
    samples = timed.samples[contestant]
    times_us = sorted(timed.times_us(contestant))
    nbytes = timed.nbytes(contestant)
    average = nbytes * samples.count / max(samples.total_ns, 1)
    return {
        "p50_us": percentile(times_us, 50),
        "p99_us": percentile(times_us, 99),
        "p99_9_us": percentile(times_us, 99.9),
        "average_gb_per_s": average,
        "peak_gb_per_s": nbytes / max(samples.min_ns, 1),
        "average_gbit_per_s": 8 * average,
    }
