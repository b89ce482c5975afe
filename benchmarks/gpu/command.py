"""``python -m skipper.benchmarks.gpu`` from the command line to the exit code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from skipper.benchmarks import output, program
from skipper.benchmarks.gpu import perftest, transfers
from skipper.benchmarks.gpu.transfers import Sweep
from skipper.benchmarks.program import Parser, report_parser
from skipper.benchmarks.report import Result
from skipper.benchmarks.sizes import format_size
from skipper.dataplane.errors import DataplaneError

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["main", "parser"]

_FULL = Sweep((8, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20), 30)
_QUICK = Sweep((8, 1 << 20), 3)


def parser(prog: str) -> Parser:
    """The parser of the command."""
    own = report_parser(
        prog,
        "Measure transfers of GPU memory between two processes of this host, and CUDA's own copies to compare.",
        exit_codes={3: "wrong data"},
        quick="two sizes and few turns: for correctness, not speed",
    )
    own.add_argument("--part", choices=("transfers", "perftest"), default="transfers", help="perftest: UCX's own")
    return own


def main(argv: Sequence[str], *, prog: str = "python -m skipper.benchmarks.gpu") -> int:
    """Run the benchmark of GPU memory; returns the exit code, as ``--help`` lists them."""
    given = parser(prog).read(argv)
    if isinstance(given, int):
        return given
    sweep = _QUICK if given.quick else _FULL

    def measure(rows: list[Result]) -> None:
        program.require_device("cuda")
        if given.part == "perftest":
            rows.extend(perftest.measure(max(sweep.sizes) // 4, sweep.turns))
        else:
            rows.extend(transfers.measure(sweep))

    return program.run(
        argv,
        measure,
        prog=prog,
        json=given.json,
        csv=given.csv,
        tables=lambda rows: [_table(rows)],
        config=lambda: {"tool": "gpu", "part": given.part, "quick": given.quick, **asdict(sweep)},
        failures=(DataplaneError, RuntimeError, OSError, MemoryError),
    )


def _table(rows: Sequence[Result]) -> Table:
    title = "memory of GPUs, between processes"
    table = output.plain_table(
        title,
        "what",
        "size",
        "by",
        "p50",
        "p99",
        "unit",
        "reference",
        "ratio",
        left=("what", "by", "unit", "reference"),
    )
    for row in rows:
        own = row.parameters
        what = f"{own['op']}, {own['from']} to {own['to']}" if "op" in own else f"{own['test']}, {own['memory']}"
        beside = row.reference and f"{row.reference.name} {output.significant(row.reference.value, 3)}"
        figures = (output.significant(value, 3) for value in (row.value, row.p99))
        ratio = "" if row.ratio is None else output.significant(row.ratio, 3)
        size = format_size(int(str(own["nbytes"])))
        table.add_row(what, size, str(own["backend"]), *figures, row.unit, str(own.get("why", beside or "")), ratio)
    return table
