"""What was timed, as rows of a report, and these as a table for people that fits 80 columns and grows row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TextIO

from skipper.benchmarks.bandwidth import ceiling
from skipper.benchmarks.bandwidth.messages import Wire, Workload
from skipper.benchmarks.bandwidth.timing import KERNEL, MEMCPY, ONE, TRANSFER, Timed, Together
from skipper.benchmarks.errors import BenchmarkError
from skipper.benchmarks.output import significant
from skipper.benchmarks.report import Reference, Result, Scalar
from skipper.benchmarks.sizes import format_size
from skipper.benchmarks.statistics import median_interval, percentile, stretches
from skipper.commandline import reader_is_gone

__all__ = ["RowPrinter", "first_use_row", "notes", "pairs_row", "percentiles_us", "size_rows", "wire_row"]

_COLUMNS = (
    ("", "size", 12),
    ("", "n", 6),
    ("p50", "µs", 7),
    ("p99", "µs", 7),
    ("p99.9", "µs", 7),
    ("GB/s", "p50", 7),
    ("", "ratio", 6),
    ("memcpy", "GB/s", 7),
    ("GB/s", "average", 8),
    ("GB/s", "peak", 7),
    ("Gb/s", "", 6),
)
"""Two lines of a heading, and the width with the space before it: 80 together. A wider cell shifts the next ones."""

_SPEEDS = ("p50_us", "p99_us", "p99_9_us", "average_gb_per_s", "peak_gb_per_s", "average_gbit_per_s")


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
    """The figures of one size: the transfers' row, then those of the yardsticks other than memcpy.

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
        taken, nbytes = timed.samples[contestant], timed.nbytes(contestant)
        average, peak = nbytes * taken.count / max(taken.total_ns, 1), nbytes / max(taken.min_ns, 1)
        return Result.from_samples(
            f"{name}_{kind}",
            unit,
            values[contestant],
            n=taken.count,
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
                **_speeds(timed.times_us(contestant), average, peak),
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
    """What all pairs moved together, compared with memcpys by all of them at once; and how the pairs differ."""
    pair_medians = moved.medians()
    times_us = [duration / 1e3 for duration in moved.durations.kept_ns()]
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
            **_speeds(times_us, average, max(moved.rates)),
        },
    )


def _ratio_interval(values: list[float], reference: list[float]) -> dict[str, Scalar]:
    """95% interval of the ratio to the reference: of the ratios of stretches that took turns."""
    ratios = [mine / theirs for mine, theirs in zip(stretches(values), stretches(reference), strict=True)]
    interval = median_interval(ratios)
    return {} if interval is None else {"ratio_low": interval[0], "ratio_high": interval[1]}


def percentiles_us(times_us: Sequence[float]) -> dict[str, Scalar]:
    """The percentiles that every row of ``skipper bw`` has."""
    ordered = sorted(times_us)
    return {f"p{str(rank).replace('.', '_')}_us": percentile(ordered, rank) for rank in (50, 99, 99.9)}


def _speeds(times_us: Sequence[float], average: float, peak: float) -> dict[str, Scalar]:
    """The figures in µs, GB/s and Gb/s, for any unit of the row; the table shows them all."""
    return {
        **percentiles_us(times_us),
        "average_gb_per_s": average,
        "peak_gb_per_s": peak,
        "average_gbit_per_s": 8 * average,
    }


class RowPrinter:
    """Prints the rows as a table, each as soon as it is known. ``ratio`` compares the medians on both sides of it.

    Args:
        out: The stream to print to; it is flushed after each row, so that the reader of a pipe sees the row at once.
        title: Makes the title of the table from its first row.
    """

    def __init__(self, out: TextIO, title: Callable[[Result], str]) -> None:
        self._out = out
        self._title = title
        self._is_begun = False

    def add(self, result: Result) -> None:
        """Print a row.

        Raises:
            BenchmarkError: Nobody reads the rows any more.
        """
        lines = [] if self._is_begun else [self._title(result), *_heading()]
        self._is_begun = True
        try:
            print(*lines, _line(_cells(result)), sep="\n", file=self._out, flush=True)
        except BrokenPipeError as error:
            reader_is_gone()
            raise BenchmarkError("the reader of the rows has closed the pipe") from error


def _heading() -> list[str]:
    above, below, widths = zip(*_COLUMNS, strict=True)
    return [_line(above), _line(below), "─" * sum(widths)]


def _line(cells: Sequence[str]) -> str:
    padded = (f"{cell:>{width - 1}}" for cell, (_, _, width) in zip(cells, _COLUMNS, strict=False))
    return " " + " ".join(padded).rstrip()


def _cells(result: Result) -> list[str]:
    parameters = result.parameters
    if result.name == "first_use":
        return ["first use", "1", significant(result.value)]
    if result.name == "wire_bandwidth":
        rate = significant(result.value)
        return ["wire", *[""] * 7, rate, rate, significant(_number(parameters["average_gbit_per_s"]))]
    if "operations_per_s" in parameters:
        return [str(parameters["op"]), str(result.n), *(significant(_number(parameters[key])) for key in _SPEEDS[:3])]
    label = format_size(int(_number(parameters["size"])))
    if parameters["batch"] != 1:
        label = f"{parameters['batch']} x {label}"
    if parameters["backend"] == "kernel":
        label = f"kernel {label}"
    elif result.name.startswith("one_transfer"):
        label = f"as one {label}"
    times, rates = ([significant(_number(parameters[key])) for key in keys] for keys in (_SPEEDS[:3], _SPEEDS[3:]))
    own, ratio, reference = _beside_reference(result)
    return [label, str(result.n), *times, significant(own), f"{ratio:.3f}", significant(reference), *rates]


def notes(results: Sequence[Result]) -> str:
    """What a reader of the table must also know; it is printed below the table."""
    return "\n".join(dict.fromkeys(note for result in results for note in (*_notes(result), *_checked(result))))


def _checked(result: Result) -> list[str]:
    if not result.parameters.get("verified"):
        return []
    if "operations_per_s" in result.parameters:
        return ["checked: each answer was the one before plus one, and a word that another had changed was noticed"]
    return ["checked: the data was compared at both ends, and a byte that was wrong on purpose was noticed"]


def _notes(result: Result) -> list[str]:
    """What a reader must know about one row."""
    parameters = result.parameters
    if result.name == "first_use":
        parts = {part: _number(parameters[f"{part}_us"]) for part in ("register", "connect")}
        costs = " + ".join(f"{part} {significant(value)} µs" for part, value in parts.items())
        return [f"first use: {costs}"]
    if result.name == "wire_bandwidth":
        return [f"wire: {parameters['wire']}"]
    if "operations_per_s" in parameters:
        reference = result.reference
        return [] if reference is None else [f"a read of the same word takes {significant(reference.value)} µs"]
    if parameters["backend"] == "kernel":
        call = "process_vm_readv" if parameters["op"] == "read" else "process_vm_writev"
        return [f"kernel: {call}, what UCX itself uses within a host"]
    if "slowest_pair_gb_per_s" in parameters:
        ends = [significant(_number(parameters[f"{which}_pair_gb_per_s"])) for which in ("slowest", "fastest")]
        size = format_size(int(_number(parameters["size"])))
        return [f"{size}: a pair moves {ends[0]} to {ends[1]} GB/s", "memcpy: by all pairs at once"]
    ratio = parameters.get("ratio_to_one_transfer")
    if ratio is None:
        return []
    size = format_size(int(_number(parameters["size"])))
    speed = _number(ratio) if result.unit == "GB/s" else 1 / _number(ratio)
    return [
        f"{parameters['batch']} x {size}: {parameters['segments']} segments, {speed:.3f} of the rate of one transfer"
    ]


def _beside_reference(result: Result) -> tuple[float, float, float]:
    """The median rate in GB/s, its ratio to the rate of the reference, and that rate, for any unit of the row."""
    if result.reference is None or result.ratio is None:
        return 0.0, 0.0, 0.0
    if result.unit == "GB/s":
        return result.value, result.ratio, result.reference.value
    nbytes = _number(result.parameters["nbytes"])
    return nbytes / (result.value * 1e3), 1 / result.ratio, nbytes / (result.reference.value * 1e3)


def _number(value: Scalar) -> float:
    if not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    return value
