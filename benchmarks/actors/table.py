"""The rows of a run as a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from skipper.benchmarks.output import significant
from skipper.benchmarks.report import Result

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["table"]


def table(results: Sequence[Result], *, title: str = "control plane") -> Table:
    """Lay the rows out; a ratio is of medians, and below 1 is better for a time, above 1 for a rate."""
    from rich import box
    from rich.table import Table

    out = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    out.add_column("figure", no_wrap=True)
    for column in ("p50", "p99", "unit", "n", "ratio"):
        out.add_column(column, justify="right", no_wrap=True)
    out.add_column("to", no_wrap=True)
    for row in results:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        beside = "" if row.reference is None else row.reference.name
        out.add_row(row.name, significant(row.p50), significant(row.p99), row.unit, str(row.n), ratio, beside)
    return out
