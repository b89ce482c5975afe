"""Putting a report where people and machines want it: JSON, CSV, tables. Pictures are in `plot`."""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

from skipper.benchmarks.errors import UsageError
from skipper.benchmarks.report import Report, Result

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["STDOUT", "check_writable", "console", "significant", "write_csv", "write_json"]

STDOUT = "-"
"""The path that means standard output."""

_WIDTH = 100


def console(*, json_on_stdout: bool = False) -> Console:
    """Where tables go: standard output, or standard error when the JSON has standard output to itself."""
    from rich.console import Console

    out = Console(stderr=json_on_stdout, highlight=False)
    # A pipe has no width, and on a narrow terminal a folded line is better than a clipped figure.
    out.width = max(out.width, _WIDTH) if out.is_terminal else _WIDTH
    return out


def check_writable(path: str | None) -> None:
    """Find out before a long run, rather than after it, that its result could not be written.

    Raises:
        UsageError: The folder of ``path`` does not exist, or ``path`` is a folder itself.
    """
    if path is None or path == STDOUT:
        return
    target = Path(path)
    if target.is_dir():
        raise UsageError(f"{path} is a folder; name a file to write")
    if not target.absolute().parent.is_dir():
        raise UsageError(f"{path} cannot be written: there is no folder {target.parent}")


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
    """Print a figure with ``digits`` significant ones, never in exponents: 0.01234, 12.34, 1234."""
    if abs(value) >= 1:
        return f"{value:.{max(digits - len(str(int(abs(value)))), 0)}f}"
    # Decimal prints without an exponent what :g has rounded.
    return f"{Decimal(f'{value:.{digits}g}'):f}"
