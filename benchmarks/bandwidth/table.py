"""The rows of a run as a table for people, narrow enough for 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from skipper.benchmarks.output import significant
from skipper.benchmarks.report import Result, Scalar
from skipper.benchmarks.sizes import format_size

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["table"]

_COLUMNS = (
    "size",
    "iterations",
    "p50\nµs",
    "p99\nµs",
    "p99.9\nµs",
    "GB/s\naverage",
    "GB/s\npeak",
    "Gb/s",
    "memcpy\nGB/s",
    "ratio",
)

_SPEEDS = ("p50_us", "p99_us", "p99_9_us", "average_gb_per_s", "peak_gb_per_s", "average_gbit_per_s")


def table(results: Sequence[Result], *, title: str) -> Table:
    """Lay the rows out; ``ratio`` is of medians, and more than 1 is always faster than memcpy."""
    from rich import box
    from rich.table import Table

    out = Table(
        title=title,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        pad_edge=False,
    )
    for column in _COLUMNS:
        out.add_column(column, justify="right", no_wrap=True)
    notes = []
    for result in results:
        if result.name == "first_use":
            parts = {part: _number(result.parameters[f"{part}_us"]) for part in ("register", "connect")}
            out.add_row("first use", "1", significant(result.value))
            costs = " + ".join(f"{part} {significant(value)} µs" for part, value in parts.items())
            notes.append(f"first use: {costs}")
        elif result.name == "wire_bandwidth":
            rate = significant(result.value)
            out.add_row(
                "wire", "", "", "", "", rate, rate, significant(_number(result.parameters["average_gbit_per_s"]))
            )
            notes.append(f"wire: {result.parameters['wire']}")
        elif "operations_per_s" in result.parameters:
            times = [significant(_number(result.parameters[key])) for key in _SPEEDS[:3]]
            out.add_row(str(result.parameters["op"]), str(result.n), *times)
            if result.reference is not None:
                notes.append(f"a read of the same word takes {significant(result.reference.value)} µs")
        else:
            out.add_row(*_cells(result))
            notes += _notes(result)
    out.caption = "\n".join(dict.fromkeys(notes))
    return out


def _cells(result: Result) -> list[str]:
    parameters = result.parameters
    label = format_size(int(_number(parameters["size"])))
    if parameters["batch"] != 1:
        label = f"{parameters['batch']} x {label}"
    if result.parameters["backend"] == "kernel":
        label = f"kernel {label}"
    elif result.name.startswith("one_transfer"):
        label = f"as one {label}"
    reference, ratio = _beside_reference(result)
    speeds = [significant(_number(parameters[key])) for key in _SPEEDS]
    return [label, str(result.n), *speeds, significant(reference), f"{ratio:.3f}"]


def _notes(result: Result) -> list[str]:
    """What the reader of the table must know about a row, for below it."""
    parameters = result.parameters
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


def _beside_reference(result: Result) -> tuple[float, float]:
    """The reference in GB/s, and how fast the row is beside it, whichever unit the row is in."""
    if result.reference is None or result.ratio is None:
        return 0.0, 0.0
    if result.unit == "GB/s":
        return result.reference.value, result.ratio
    nbytes = _number(result.parameters["nbytes"])
    return nbytes / (result.reference.value * 1e3), 1 / result.ratio


def _number(value: Scalar) -> float:
    if not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    return value
