"""A report in the forms that people and machines want: JSON, CSV, tables and pictures."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Collection, Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

from skipper.benchmarks.errors import UsageError
from skipper.benchmarks.report import Report, Result
from skipper.benchmarks.sizes import format_size
from skipper.commandline import STDOUT, output_path

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = [
    "STDOUT",
    "check_can_plot",
    "check_writable",
    "console",
    "figures_table",
    "plain_table",
    "plot_rates",
    "significant",
    "write_csv",
    "write_json",
]

_WIDTH = 100


def console(*, json_on_stdout: bool = False) -> Console:
    """Where tables go: standard output, or standard error when the JSON has standard output to itself."""
    from rich.console import Console

    out = Console(stderr=json_on_stdout, highlight=False)
    # A pipe has no width, and on a narrow terminal a folded line is better than a clipped figure.
    out.width = max(out.width, _WIDTH) if out.is_terminal else _WIDTH
    return out


def plain_table(title: str, *columns: str, left: Collection[str] = ()) -> Table:
    """An empty table. Columns are aligned right, except for those in ``left``."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", no_wrap=True)
    return table


def figures_table(results: Sequence[Result], *, title: str) -> Table:
    """Lay the rows out. A ratio compares medians: below 1 is better for a time, above 1 for a rate."""
    table = plain_table(title, "figure", "p50", "p99", "unit", "n", "ratio", "to", left=("figure", "to"))
    for row in results:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        beside = "" if row.reference is None else row.reference.name
        table.add_row(row.name, significant(row.p50), significant(row.p99), row.unit, str(row.n), ratio, beside)
    return table


def check_writable(path: str | None) -> None:
    """Check before a long run that its result can be written.

    Raises:
        UsageError: The folder of ``path`` does not exist, or ``path`` is a folder itself.
    """
    if path is not None:
        try:
            output_path(path)
        except argparse.ArgumentTypeError as error:
            raise UsageError(str(error)) from error


def write_json(report: Report, path: str) -> None:
    """Write the report to a file, or alone on standard output for ``-``."""
    text = report.to_json()
    if path == STDOUT:
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        Path(path).write_text(text)


def write_csv(results: Sequence[Result], path: str) -> None:
    """Write one line per row: the fixed keys first, then every parameter that any row has."""
    rows = []
    for result in results:
        row = result.to_dict()
        reference = row.pop("reference") or {"name": None, "value": None}
        rows.append({**row, **{f"reference_{key}": value for key, value in reference.items()}})
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with Path(path).open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)


def significant(value: float, digits: int = 4) -> str:
    """Print a figure with ``digits`` significant digits, never with an exponent: 0.01234, 12.34, 1234."""
    if abs(value) >= 1:
        return f"{value:.{max(digits - len(str(int(abs(value)))), 0)}f}"
    # Decimal prints without an exponent what :g has rounded.
    return f"{Decimal(f'{value:.{digits}g}'):f}"


def check_can_plot() -> None:
    """Check before a long run that a picture can be drawn after it.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        import matplotlib as _matplotlib  # noqa: F401 - only its presence matters here
    except ImportError as error:
        raise UsageError("--plot needs matplotlib: pip install 'skipper-mesh[plot]'") from error


def plot_rates(results: Sequence[Result], path: str, *, title: str) -> None:
    """Draw every series of rates over its sizes into a PNG file.

    Args:
        results: Rows with an ``nbytes`` parameter and one unit in common; rows of one name form a line.
        path: File to write.
        title: Heading of the picture.

    Raises:
        ValueError: No row has an ``nbytes`` parameter.
    """
    # The object interface: no global figure, no display, nothing to close.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    series: dict[str, list[tuple[int, Result]]] = {}
    for result in results:
        nbytes = result.parameters.get("nbytes")
        if isinstance(nbytes, int):
            series.setdefault(result.name, []).append((nbytes, result))
    if not series:
        raise ValueError("nothing to draw: no row says how many bytes it moved")

    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    rates, ratios = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    references: dict[str, dict[int, float]] = {}
    for name, points in series.items():
        points.sort(key=lambda point: point[0])
        sizes = [nbytes for nbytes, _ in points]
        (line,) = rates.plot(sizes, [result.value for _, result in points], marker="o", label=name)
        rates.fill_between(
            sizes, [result.min for _, result in points], [result.max for _, result in points], alpha=0.15
        )
        held = {nbytes: result.ratio for nbytes, result in points if result.ratio is not None}
        ratios.plot(list(held), list(held.values()), marker="o", color=line.get_color())
        for nbytes, result in points:
            if result.reference is not None:
                references.setdefault(result.reference.name, {})[nbytes] = result.reference.value
    for name, values in references.items():
        rates.plot(sorted(values), [values[n] for n in sorted(values)], "--", color="grey", label=name)

    every_size = sorted({nbytes for points in series.values() for nbytes, _ in points})
    unit = next(iter(series.values()))[0][1].unit
    rates.set(title=title, ylabel=f"{unit} (median; band: all samples)", xscale="log", ylim=(0, None))
    rates.legend()
    ratios.axhline(1.0, linestyle="--", color="grey")
    ratios.set(xlabel="size", ylabel="ratio to the reference", ylim=(0, None))
    ratios.set_xticks(every_size, [format_size(n) for n in every_size], rotation=45)
    ratios.minorticks_off()
    for axes in (rates, ratios):
        axes.grid(visible=True, alpha=0.3)
    figure.savefig(path, format="png", dpi=120)
