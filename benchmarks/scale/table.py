"""The rows of a run as tables for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from skipper.benchmarks.output import significant
from skipper.benchmarks.report import Result

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["tables"]


def tables(results: Sequence[Result], limit: str) -> Iterator[Table]:
    """What was measured, what it costs, and what the model says beyond; ``limit`` says why there are not more."""
    by_key = {(row.name, row.parameters.get("ranks"), row.parameters.get("way")): row for row in results}
    calls = [row for row in results if row.name == "call_us"]
    procs = next(row for row in results if row.name == "processes")
    out = _table(f"{procs.value:g} processes ({limit})")
    for column in ("ranks", "way", "call p50 us", "p99", "model us", "error", "broadcast msgs/s"):
        out.add_column(column, justify="right", no_wrap=True)
    for row in calls:
        ranks, way = row.parameters["ranks"], row.parameters["way"]
        rate = by_key["broadcast_msgs_per_s", ranks, way]
        error = row.parameters["model_error"]
        assert isinstance(error, float)  # so they were made
        assert row.reference is not None
        figures = [significant(value) for value in (row.p50, row.p99, row.reference.value)]
        out.add_row(str(ranks), str(way), *figures, f"{error:+.0%}", significant(rate.p50))
    yield out
    cores = next(row for row in results if row.name == "cores")
    prices = [row for row in results if row.name.startswith("cost_")]
    costs = _table(f"measured costs in us; the processes got {significant(cores.value)} cores")
    costs.add_column("ranks", justify="right")
    for name in dict.fromkeys(row.name for row in prices):
        costs.add_column(name.removeprefix("cost_").removesuffix("_us"), justify="right", no_wrap=True)
    for ranks in dict.fromkeys(row.parameters["ranks"] for row in prices):
        costs.add_row(str(ranks), *(significant(row.value) for row in prices if row.parameters["ranks"] == ranks))
    yield costs
    beyond = _table("modelled, each rank on a core of its own")
    for column in ("ranks", "way", "depth", "call ms", "caster's messages", "caster's kB", "most of a rank", "kB"):
        beyond.add_column(column, justify="right", no_wrap=True)
    for row in results:
        if row.name == "modelled_call_us":
            found = row.parameters
            kilobytes = [significant(float(found[key] or 0) / 1e3) for key in ("caster_nbytes", "most_nbytes")]
            beyond.add_row(
                str(found["ranks"]),
                str(found["way"]),
                str(found["depth"]),
                significant(row.value / 1e3),
                str(found["caster_messages"]),
                kilobytes[0],
                str(found["most_messages"]),
                kilobytes[1],
            )
    yield beyond


def _table(title: str) -> Table:
    from rich import box
    from rich.table import Table

    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
