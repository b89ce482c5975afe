"""``python -m skipper.benchmarks.weight_sync`` from the command line to the exit code."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from skipper.benchmarks import output, program
from skipper.benchmarks.program import Parser, report_parser
from skipper.benchmarks.report import Result
from skipper.benchmarks.weight_sync.job import SyncWorkload, run
from skipper.benchmarks.weight_sync.model import Model
from skipper.control import ControlError, shutdown
from skipper.dataplane.errors import DataplaneError
from skipper.torchstore.errors import StoreError

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["main", "parser"]

_FULL = SyncWorkload(Model(), 2, 2, 8, 10, 25, 300, 10_000, (64, 48))
_QUICK = SyncWorkload(Model(layers=2, vocabulary=4096), 2, 2, 3, 2, 2, 20, 480, (8, 6))


def parser(prog: str) -> Parser:
    """The parser of the command."""
    own = report_parser(
        prog,
        "Weights from trainers to generators through torchstore, beside a memcpy of as many bytes.",
        exit_codes={3: "wrong data"},
        quick="a small model and few turns: for correctness, not speed",
    )
    own.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the weights lie, at both ends")
    return own


def main(argv: Sequence[str], *, prog: str = "skipper weight-sync") -> int:
    """Run the weight-sync benchmark; returns the exit code, as ``--help`` lists them."""
    given = parser(prog).read(argv)
    if isinstance(given, int):
        return given
    workload = replace(_QUICK if given.quick else _FULL, device=given.device)
    try:
        return program.run(
            argv,
            lambda rows: asyncio.run(_collect(workload, rows)),
            prog=prog,
            json=given.json,
            csv=given.csv,
            tables=lambda rows: [_table(rows)],
            config=lambda: {"tool": "weight_sync", "quick": given.quick, **asdict(workload)},
            failures=(ControlError, StoreError, DataplaneError, TimeoutError, OSError, MemoryError),
        )
    finally:
        shutdown()


async def _collect(workload: SyncWorkload, rows: list[Result]) -> None:
    program.require_device(workload.device)
    async for row in run(workload):
        rows.append(row)
        if sys.stderr.isatty():
            print(f"{row.name}: {output.significant(row.value)} {row.unit}", file=sys.stderr, flush=True)


def _table(rows: Sequence[Result]) -> Table:
    title = "weights from trainers to generators"
    table = output.plain_table(
        title, "what", "n", "p50", "p99", "unit", "beside", "ratio", left=("what", "unit", "beside")
    )
    for row in rows:
        beside = row.reference and f"{row.reference.name} {output.significant(row.reference.value, 3)}"
        ratio = "" if row.ratio is None else output.significant(row.ratio, 3)
        figures = (output.significant(value, 3) for value in (row.value, row.p99))
        table.add_row(row.name, str(row.n), *figures, row.unit, beside or "", ratio)
    return table
