"""``python -m skipper.benchmarks.weight_sync`` from the command line to the exit code."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skipper import dataplane
from skipper.benchmarks import output, program
from skipper.benchmarks.backends import AUTO, add_backend, require_backend
from skipper.benchmarks.errors import BenchmarkError, UsageError
from skipper.benchmarks.machine import available_nbytes
from skipper.benchmarks.program import Parser, report_parser
from skipper.benchmarks.report import Report, Result
from skipper.benchmarks.weight_sync.given_model import GivenModel, read_model
from skipper.benchmarks.weight_sync.job import SyncWorkload, run
from skipper.benchmarks.weight_sync.model import Model
from skipper.benchmarks.weight_sync.modelled.page import modelled_tables, section
from skipper.benchmarks.weight_sync.modelled.rows import FULL, QUICK, ModelledWorkload, run_modelled
from skipper.benchmarks.weight_sync.progress import SyncProgress
from skipper.commandline import output_path, whole
from skipper.control import ControlError, shutdown
from skipper.dataplane.errors import DataplaneError
from skipper.torchstore.errors import StoreError

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["USUAL", "main", "parser"]

USUAL = SyncWorkload(Model(), 2, 1, 2, 8, 10, 25, 300, 10_000, (64, 48))
"""What is done without arguments."""
_QUICK = SyncWorkload(Model(layers=2, vocabulary=4096), 2, 1, 2, 3, 2, 2, 20, 480, (8, 6))
_MOST_RANKS = 256

_FAILURES = (ControlError, StoreError, DataplaneError, TimeoutError, OSError, MemoryError)


def parser(prog: str) -> Parser:
    """The parser of the command."""
    own = report_parser(
        prog,
        "Measure syncs of weights from trainers to generators through torchstore, and a memcpy of as many bytes.",
        exit_codes={3: "wrong data"},
        quick="only a small model and a few rounds, to check that it works; the figures mean nothing",
    )
    own.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the weights are, at both ends")
    own.add_argument(
        "--model",
        metavar="CONFIG",
        help="a model of your own: a config.json or its folder, a name in the local cache of Hugging Face, or a JSON "
        "file of names and shapes; nothing is downloaded. With --model, --mode or --backend, only syncs of whole "
        "models are measured",
    )
    own.add_argument("--layers", type=whole(1), metavar="N", help="use only N layers of --model, if it is too large")
    add_backend(own)
    own.add_argument("--mode", choices=("direct", "snapshot"), help="measure only this way to put weights")
    ranks = whole(1, _MOST_RANKS)
    own.add_argument(
        "--trainers", type=ranks, metavar="N", help="processes with the model as FSDP shards it (default: 2)"
    )
    own.add_argument(
        "--generators", type=ranks, metavar="N", help="engines, each of which reads the whole model (default: 1)"
    )
    own.add_argument("--tp", type=ranks, metavar="N", help="tensor-parallel processes of each engine (default: 2)")
    own.add_argument(
        "-n", "--iterations", type=whole(1, 10_000), metavar="N", help="measured syncs of each mode (default: 10)"
    )
    own.add_argument(
        "--modelled",
        action="store_true",
        help="simulate a model of a trillion parameters on hundreds of GPUs instead: plans are compiled from shapes "
        "alone, transfers are simulated, and the simulation is compared with syncs on this host",
    )
    own.add_argument(
        "--page", type=output_path, metavar="PATH", help="with --modelled: write the results as a Markdown page"
    )
    return own


def main(argv: Sequence[str], *, prog: str = "skipper weight-sync") -> int:
    """Run the weight-sync benchmark; returns the exit code, as ``--help`` lists them."""
    given = parser(prog).read(argv)
    if isinstance(given, int):
        return given
    try:
        if given.modelled:
            return _run_modelled(argv, given, prog)
        workload = _workload(given)
    except BenchmarkError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return error.exit_code
    try:
        return program.run(
            argv,
            lambda rows: asyncio.run(_collect(workload, rows)),
            prog=prog,
            json=given.json,
            csv=given.csv,
            tables=lambda rows: [_table(rows)],
            config=lambda: {"tool": "weight_sync", "quick": given.quick, **_described(workload)},
            failures=_FAILURES,
        )
    finally:
        shutdown()


def _run_modelled(argv: Sequence[str], given: argparse.Namespace, prog: str) -> int:
    """The job of a trillion parameters.

    Raises:
        UsageError: Arguments that are about syncs on this host.
    """
    others = ("model", "layers", "mode", "trainers", "generators", "tp", "iterations")
    odd = next((name for name in others if getattr(given, name) is not None), None)
    odd = "backend" if odd is None and given.backend != AUTO else odd
    if odd is not None or given.device != "cpu":
        raise UsageError(f"--{odd or 'device'} is about syncs on this host: leave it out with --modelled")
    workload = QUICK if given.quick else FULL
    config = {"tool": "weight_sync", "modelled": True, "quick": given.quick}

    def write_page(rows: Sequence[Result]) -> list[Table]:
        if given.page is not None:
            Path(given.page).write_text(section(Report(argv=[*prog.split(), *argv], config=config, results=rows)))
        return list(modelled_tables(rows))

    try:
        return program.run(
            argv,
            lambda rows: asyncio.run(_collect_modelled(workload, rows)),
            prog=prog,
            json=given.json,
            csv=given.csv,
            tables=write_page,
            config=lambda: config,
            failures=_FAILURES,
        )
    finally:
        shutdown()


async def _collect_modelled(workload: ModelledWorkload, rows: list[Result]) -> None:
    with SyncProgress() as progress:
        async for row in run_modelled(workload, progress):
            rows.append(row)
            progress.say(f"{row.name}: {output.significant(row.value)} {row.unit}")


def _workload(given: argparse.Namespace) -> SyncWorkload:
    """What is to be done.

    Raises:
        UsageError: There is no such model, or this host has no room for it.
    """
    if given.layers is not None and given.model is None:
        raise UsageError("--layers is about --model")
    if given.page is not None:
        raise UsageError("--page is about --modelled")
    require_backend(given.backend)
    workload = _QUICK if given.quick else USUAL
    model = workload.model if given.model is None else read_model(given.model, given.layers)
    workload = replace(
        workload,
        model=model,
        trainers=given.trainers or workload.trainers,
        generators=given.generators or workload.generators,
        tensor_parallel=given.tp or workload.tensor_parallel,
        iterations=given.iterations or workload.iterations,
        device=given.device,
        backend=given.backend,
        modes=workload.modes if given.mode is None else (given.mode,),
        only_syncs=given.model is not None or given.mode is not None or given.backend != AUTO,
    )
    if workload.generator_ranks > _MOST_RANKS:
        raise UsageError(f"{workload.generators} engines of {workload.tensor_parallel} processes are too many")
    needed, room = workload.most_nbytes(), available_nbytes()
    if given.device == "cpu" and needed > room:
        raise UsageError(
            f"this takes {needed / 1e9:.1f} GB of memory, and {room / 1e9:.1f} GB are there: fewer --layers or "
            "--generators, and --mode direct, take less"
        )
    return workload


def _described(workload: SyncWorkload) -> dict[str, Any]:
    """The workload for the report: of a model that was given its size, since its tensors may be thousands."""
    model = workload.model
    if not isinstance(model, GivenModel):
        return asdict(workload)
    size = {"name": model.name, "tensors": len(model.tensors), "numel": model.numel()}
    return {**asdict(replace(workload, model=Model())), "model": size}


async def _collect(workload: SyncWorkload, rows: list[Result]) -> None:
    program.require_device(workload.device)
    dataplane.configure(backend=workload.backend)  # of the store's volume, which is in this process
    with SyncProgress() as progress:
        async for row in run(workload, progress):
            rows.append(row)
            progress.say(f"{row.name}: {output.significant(row.value)} {row.unit}")


def _table(rows: Sequence[Result]) -> Table:
    title = "weights from trainers to generators"
    table = output.plain_table(
        title, "what", "n", "p50", "p99", "unit", "reference", "ratio", left=("what", "unit", "reference")
    )
    for row in rows:
        beside = row.reference and f"{row.reference.name} {output.significant(row.reference.value, 3)}"
        ratio = "" if row.ratio is None else output.significant(row.ratio, 3)
        figures = (output.significant(value, 3) for value in (row.value, row.p99))
        table.add_row(row.name, str(row.n), *figures, row.unit, beside or "", ratio)
    return table
