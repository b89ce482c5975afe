"""What was timed, as rows of a report."""

from __future__ import annotations

from skipper.benchmarks.bandwidth import ceiling
from skipper.benchmarks.bandwidth.messages import Wire, Workload
from skipper.benchmarks.bandwidth.timing import KERNEL, MEMCPY, ONE, TRANSFER, Timed
from skipper.benchmarks.bandwidth.together import Together
from skipper.benchmarks.report import Reference, Result, Scalar
from skipper.benchmarks.statistics import median_interval, percentile, stretches

__all__ = ["first_use_row", "pairs_row", "size_rows", "wire_row"]


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


def wire_row(wire: Wire, workload: Workload) -> Result:
    """The ceiling that the wire sets, as a row of its own; both directions of it where both are used."""
    gbit_per_s = (wire.gbit_per_s or 0.0) * (2 if workload.bidirectional else 1)
    parameters: dict[str, Scalar] = {
        "backend": "wire",
        "op": workload.op,
        "bidirectional": workload.bidirectional,
        "wire": wire.told,
        "average_gbit_per_s": gbit_per_s,
    }
    return Result.single("wire_bandwidth", "GB/s", gbit_per_s / 8, parameters=parameters)


def _wire_share(wire: Wire, workload: Workload, gb_per_s: float) -> dict[str, Scalar]:
    """How much of the wire a rate is; ``wire`` says which one, or why there is none."""
    if wire.gbit_per_s is None:
        return {"wire": wire.told, "wire_gb_per_s": None, "ratio_to_wire": None}
    rate = wire_row(wire, workload).value
    return {"wire": wire.told, "wire_gb_per_s": rate, "ratio_to_wire": gb_per_s / rate}


def size_rows(
    timed: Timed, workload: Workload, *, backend: str, wire: Wire, latency: bool, verified: bool
) -> list[Result]:
    """The figures of one size: the transfers' row, then those of the yardsticks that were timed beside the memcpy.

    Args:
        timed: The samples.
        workload: What was done.
        backend: Which backend did it.
        wire: The wire that was crossed, if any.
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
                "copy_threads": workload.copy_threads,
                "pairs": 1,
                **parameters,
                **_ratio_interval(values[contestant], values[MEMCPY]),
                **_speeds(timed, contestant),
            },
        )

    own: dict[str, Scalar] = {
        "backend": backend,
        "verified": verified,
        "transfers_per_sample": timed.transfers_per_run,
        "segments": timed.segments,
        **_wire_share(wire, workload, percentile(sorted(timed.rates(TRANSFER)), 50)),
    }
    beside = []
    if KERNEL in medians:
        call = ceiling.name(workload.op)
        own[f"ratio_to_{call}"] = medians[TRANSFER] / medians[KERNEL]
        beside.append(row(KERNEL, call, {"backend": "kernel"}))
    if ONE in medians:
        own["ratio_to_one_transfer"] = medians[TRANSFER] / medians[ONE]
        whole: dict[str, Scalar] = {"backend": backend, "size": timed.size * workload.batch, "batch": 1}
        beside.append(row(ONE, "one_transfer", whole))
    return [row(TRANSFER, workload.op, own), *beside]


def pairs_row(
    moved: Together,
    copied: Together,
    workload: Workload,
    *,
    size: int,
    backend: str,
    wire: Wire,
    verified: bool,
) -> Result:
    """What all pairs moved together, beside the memcpys of all of them at once; and how the pairs differ."""
    pair_medians = moved.medians()
    times_us = sorted(duration / 1e3 for duration in moved.durations.kept_ns())
    median = percentile(sorted(moved.rates), 50)
    average = sum(moved.rates) / len(moved.rates)
    return Result.from_samples(
        f"{workload.op}_bandwidth",
        "GB/s",
        moved.rates,
        reference=Reference(f"memcpy by {len(pair_medians)} at once", percentile(sorted(copied.rates), 50)),
        parameters={
            "op": workload.op,
            "nbytes": moved.nbytes,
            "size": size,
            "batch": workload.batch,
            "mem": workload.mem,
            "bidirectional": False,
            "copy_threads": workload.copy_threads,
            "pairs": len(pair_medians),
            "backend": backend,
            "verified": verified,
            "transfers_per_sample": moved.durations.count // len(moved.rates),
            "slowest_pair_gb_per_s": min(pair_medians),
            "fastest_pair_gb_per_s": max(pair_medians),
            **_wire_share(wire, workload, median),
            **_ratio_interval(moved.rates, copied.rates),
            "p50_us": percentile(times_us, 50),
            "p99_us": percentile(times_us, 99),
            "p99_9_us": percentile(times_us, 99.9),
            "average_gb_per_s": average,
            "peak_gb_per_s": max(moved.rates),
            "average_gbit_per_s": 8 * average,
        },
    )


def _ratio_interval(values: list[float], reference: list[float]) -> dict[str, Scalar]:
    """95% interval of the ratio to the reference: of the ratios of stretches that took turns."""
    ratios = [mine / theirs for mine, theirs in zip(stretches(values), stretches(reference), strict=True)]
    interval = median_interval(ratios)
    return {} if interval is None else {"ratio_low": interval[0], "ratio_high": interval[1]}


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
