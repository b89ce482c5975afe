"""Load a safetensors checkpoint into trainer processes and reshard it into generator processes.

Every tensor of the checkpoint, whatever its name, shape and dtype, is cut over T trainers by rows. G
generators read it from the trainers' memory, in place, in a layout of their own, and compare each bit with
the files.

    python -m examples.sync_checkpoint DIR
    python -m examples.sync_checkpoint DIR --trainers 3 --generators 4 --layout grid --json -
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

# So that `python examples/sync_checkpoint.py` works as well as `python -m examples.sync_checkpoint`.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.table import Table

from examples.checkpoint.actors import Generator, Trainer
from examples.checkpoint.files import Checkpoint, CheckpointError
from examples.checkpoint.layouts import LAYOUTS
from examples.faults import FirstFault
from examples.process_group import ENVIRONMENT, connect
from examples.yardstick import time_memcpy
from skipper import torchstore as ts
from skipper.benchmarks.errors import UsageError
from skipper.benchmarks.output import STDOUT, check_writable, console, significant, write_json
from skipper.benchmarks.report import Reference, Report, Result
from skipper.control import ControlError, shutdown, this_host
from skipper.dataplane.errors import DataplaneError
from skipper.torchstore.errors import StoreError


@dataclass(slots=True)
class Measured:
    """What one run measured; the lists hold a figure for each sync, the first of which also plans.

    ``seconds`` count from the publication until the last generator has all, ``transfer_seconds`` are what
    the slowest generator spent on moving bytes.
    """

    tensors: int
    nbytes: int = 0
    load_seconds: float = 0.0
    seconds: list[float] = field(default_factory=list)
    transfer_seconds: list[float] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)

    def results(self, memcpy_seconds: float) -> list[Result]:
        """The rows of the report."""
        warm = self.seconds[1:]
        where = {"nbytes": self.nbytes, "tensors": self.tensors}
        copy_rate = self.nbytes / memcpy_seconds / 1e9
        rates = [self.nbytes / s / 1e9 for s in warm]
        in_seconds, in_rate = Reference("memcpy", memcpy_seconds), Reference("memcpy", copy_rate)
        return [
            Result.from_samples("sync_s", "s", warm, reference=in_seconds, parameters=where),
            Result.from_samples("sync_gb_per_s", "GB/s", rates, reference=in_rate, parameters=where),
            Result.from_samples("transfer_s", "s", self.transfer_seconds[1:], reference=in_seconds, parameters=where),
            Result.single("first_sync_s", "s", self.seconds[0], reference=in_seconds, parameters=where),
            Result.single("load_s", "s", self.load_seconds),
        ]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with status 2 on one that makes no sense."""
    summary, _, _ = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(prog="python -m examples.sync_checkpoint", description=summary)
    parser.add_argument("directory", metavar="DIR", type=Path, help="a folder of .safetensors files, or one file")
    parser.add_argument("--trainers", type=int, default=2, metavar="T", help="processes that hold (default: 2)")
    parser.add_argument("--generators", type=int, default=2, metavar="G", help="processes that read (default: 2)")
    parser.add_argument(
        "--layout", choices=LAYOUTS, default="columns", help="the generators' layout (default: %(default)s)"
    )
    parser.add_argument("-n", "--iters", type=int, default=10, help="warm syncs to measure (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="for each step (default: 300)")
    parser.add_argument("--json", metavar="PATH", help="write the figures there; - prints them alone on stdout")
    options = parser.parse_args(argv)
    if min(options.trainers, options.generators, options.iters) < 1:
        parser.error("--trainers, --generators and --iters must be at least 1")
    try:
        check_writable(options.json)
        options.directory = options.directory.resolve()
        options.checkpoint = Checkpoint(options.directory)
    except (UsageError, CheckpointError) as error:
        parser.error(str(error))
    return options


async def run(options: argparse.Namespace) -> Measured:
    """Load on one side, read from the other ``iters`` + 1 times, check.

    Raises:
        SupervisionError: A process died.
        ActorError: An actor raised.
        TimeoutError: A step did not end in ``--timeout`` seconds.
    """
    timeout_s = options.timeout
    trainer_procs, generator_procs = (
        this_host().spawn_procs(per_host={"gpus": size}, env=ENVIRONMENT, name=name)
        for name, size in (("trainers", options.trainers), ("generators", options.generators))
    )
    trainers = trainer_procs.spawn("trainers", Trainer, options.directory, "rows")
    generators = generator_procs.spawn("generators", Generator, options.directory, options.layout)
    measured = Measured(len(options.checkpoint.shapes))
    async with asyncio.timeout(timeout_s):
        await ts.initialize()
        await asyncio.gather(connect(trainers, timeout_s=timeout_s), connect(generators, timeout_s=timeout_s))
        begin = perf_counter()
        await trainers.load.call()
        measured.load_seconds = perf_counter() - begin
        measured.nbytes = sum(await generators.allocate.call())
    for version in range(options.iters + 1):
        async with asyncio.timeout(timeout_s):
            await generators.spoil.call()
            begin = perf_counter()
            await trainers.publish.call(version)
            transfers = await generators.pull.call(version, timeout_s)
            measured.seconds.append(perf_counter() - begin)
            measured.transfer_seconds.append(max(transfers))
    async with asyncio.timeout(timeout_s):
        wrong = await generators.check.call()
        measured.mismatched = [f"{name} in generator {rank}" for rank, names in enumerate(wrong) for name in names]
        await ts.shutdown()
    return measured


def show(measured: Measured, results: Sequence[Result]) -> Table:
    """The figures for people."""
    row = {result.name: result for result in results}
    sync, rate, transfer = row["sync_s"], row["sync_gb_per_s"], row["transfer_s"]
    table = Table(title="A checkpoint resharded from trainers to generators, in place", show_header=False)
    table.add_row("tensors", f"{measured.tensors}, {measured.nbytes:,} bytes at the generators")
    table.add_row("load from disk", f"{measured.load_seconds:.2f} s")
    table.add_row("first sync, which also plans", f"{measured.seconds[0] * 1e3:.1f} ms")
    table.add_row("sync", f"{sync.value * 1e3:.2f} ms (p50 of {sync.n}; p99 {sync.p99 * 1e3:.2f})")
    table.add_row("of it moving bytes", f"{transfer.value * 1e3:.2f} ms in the slowest generator")
    table.add_row("rate", f"{significant(rate.value, 3)} GB/s")
    table.add_row("ratio to memcpy", f"{significant(rate.ratio or 0, 3)}, one thread, same bytes")
    table.add_row("bits", "all equal to the files" if not measured.mismatched else "WRONG")
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; 0 when every bit arrived."""
    options = parse(argv)
    people = console(json_on_stdout=options.json == STDOUT)
    faults = FirstFault()
    try:
        measured = asyncio.run(faults.guard(run(options)))
    except (ControlError, StoreError, DataplaneError, TimeoutError) as error:
        people.print(f"[bold red]failed[/]: {faults.explain(error)}", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        people.print("interrupted")
        return 130
    finally:
        shutdown()
    results = measured.results(time_memcpy(measured.nbytes))
    people.print(show(measured, results))
    for place in measured.mismatched:
        people.print(f"[bold red]failed[/]: wrong bits: {place}")
    if options.json is not None:
        config: dict[str, Any] = {
            name: getattr(options, name) for name in ("trainers", "generators", "layout", "iters", "timeout")
        }
        report = Report(
            argv=sys.argv[1:] if argv is None else argv,
            config=config,
            results=results,
            errors=[f"wrong bits: {place}" for place in measured.mismatched],
            extra={"mismatched_tensors": len(measured.mismatched)},
        )
        write_json(report, options.json)
    return 1 if measured.mismatched else 0


if __name__ == "__main__":
    sys.exit(main())
