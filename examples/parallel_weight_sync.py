"""FSDP2 and a pipeline on one side, tensor parallelism on the other: the same weights, cut in other ways.

A transformer is trained by a pipeline of stages, each an FSDP2 mesh of its own that holds some layers. After each step
tensor-parallel generators read the new weights where they lie, into fused matrices of other names and shapes. Then they
compare every bit with what DTensor gathers, and the next token's logits with the pipeline's.

    python -m examples.parallel_weight_sync
    python -m examples.parallel_weight_sync --stages 3 --shards 1 --generators 4 --steps 10
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

# So that `python examples/parallel_weight_sync.py` works as well as `python -m examples.parallel_weight_sync`.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from rich.table import Table
from torch import Tensor

from examples.faults import FirstFault
from examples.parallel.generator import Generator
from examples.parallel.model import Sizes
from examples.parallel.stage import StageRank
from examples.process_group import ENVIRONMENT, connect
from skipper import torchstore as ts
from skipper.benchmarks.output import console
from skipper.control import ActorMesh, ControlError, ProcMesh, shutdown, this_host
from skipper.dataplane.errors import DataplaneError
from skipper.torchstore.errors import StoreError

SIZES = Sizes()
POSITIONS = 16
TOLERANCE = 1e-4
"""Between logits that were summed up in another order."""


@dataclass(slots=True)
class Outcome:
    """What happened: a list has an entry for each step.

    Attributes:
        losses: Of the training steps; one fewer than syncs, since the first weights are synced too.
        pulls: What each generator's reads did.
        wrong: Tensors whose bits are not those of the trainers.
        logits_differ_by: The largest difference between both sides' logits, after the last sync.
    """

    losses: list[float] = field(default_factory=list)
    pulls: list[list[ts.SyncRecord]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    logits_differ_by: float = 0.0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with status 2 on one that makes no sense."""
    summary, _, _ = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(prog="python -m examples.parallel_weight_sync", description=summary)
    parser.add_argument("--stages", type=int, default=2, metavar="N", help="pipeline stages (default: 2)")
    parser.add_argument("--shards", type=int, default=2, metavar="N", help="FSDP2 ranks of each stage (default: 2)")
    parser.add_argument("--generators", type=int, default=2, metavar="N", choices=(1, 2, 4), help="1, 2 or 4")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="training steps (default: 3)")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="for each step (default: 120)")
    options = parser.parse_args(argv)
    if not 1 <= options.stages <= SIZES.layers:
        parser.error(f"--stages must be between 1 and {SIZES.layers}, the number of layers")
    if min(options.shards, options.steps) < 1:
        parser.error("--shards and --steps must be at least 1")
    return options


def procs(name: str, size: int) -> ProcMesh:
    """Processes for one mesh."""
    return this_host().spawn_procs(per_host={"gpus": size}, env=ENVIRONMENT, name=name)


async def run(options: argparse.Namespace) -> Outcome:
    """Start the meshes, train and sync, check.

    Raises:
        SupervisionError: A process died.
        TimeoutError: A step did not end in time.
    """
    stages = [
        procs(f"stage{number}", options.shards).spawn("stage", StageRank, number, options.stages, SIZES)
        for number in range(options.stages)
    ]
    generators = procs("generators", options.generators).spawn("generators", Generator, options.stages, SIZES)
    outcome = Outcome()
    async with asyncio.timeout(options.timeout):
        await ts.initialize()
        await asyncio.gather(*(connect(mesh, timeout_s=options.timeout) for mesh in (*stages, generators)))
        await asyncio.gather(*(stage.build.call() for stage in stages), generators.allocate.call())
    chance = torch.Generator().manual_seed(0)
    for version in range(options.steps + 1):
        async with asyncio.timeout(options.timeout):
            if version:
                outcome.losses.append(await train(stages, options.shards, chance))
            waiting = generators.pull.call(version)  # asks before the version is there
            await asyncio.gather(*(stage.publish.call(version) for stage in stages))
            outcome.pulls.append([record for records in await waiting for record in records])
    async with asyncio.timeout(options.timeout):
        await check(stages, generators, options.shards, outcome)
        await ts.shutdown()
    return outcome


async def train(stages: Sequence[ActorMesh[StageRank]], shards: int, chance: torch.Generator) -> float:
    """One step of the pipeline, one micro-batch in flight: forward, backward, optimizer. The mean loss."""
    starts = torch.randint(SIZES.vocabulary, (4 * shards, 1), generator=chance)
    batch = list(((starts + torch.arange(POSITIONS)) % SIZES.vocabulary).chunk(shards))  # to be learnt: counting
    activations = batch
    for stage in stages:
        activations = list(await stage.forward.call(activations))
    losses: list[float] = list(await stages[-1].loss.call(batch))
    gradients: list[Tensor] | None = None
    for stage in reversed(stages):
        gradients = list(await stage.backward.call(gradients))
    await asyncio.gather(*(stage.update.call() for stage in stages))  # each fences off its readers first
    return sum(losses) / len(losses)


async def check(
    stages: Sequence[ActorMesh[StageRank]], generators: ActorMesh[Generator], shards: int, outcome: Outcome
) -> None:
    """Compare what the generators hold, and what they compute, with the trainers'."""
    whole: dict[str, Tensor] = {}
    for stage in stages:
        for part in await stage.whole.call():
            whole |= part
    for rank, names in enumerate(await generators.check.call(whole)):
        outcome.wrong += [f"{name} in generator {rank}" for name in names]
    tokens = torch.arange(POSITIONS).unsqueeze(0)
    activations = [tokens] * shards
    for stage in stages:
        activations = list(await stage.forward.call(activations))
    ours, *_ = await generators.logits.call(tokens)
    outcome.logits_differ_by = float((ours - activations[0][:, -1]).abs().max())


def show(outcome: Outcome, options: argparse.Namespace) -> Table:
    """What moved."""
    title = f"{options.stages} stages x {options.shards} FSDP2 ranks → {options.generators} tensor-parallel ranks"
    table = Table(title=title)
    for column in ("version", "loss", "bytes read", "segments", "slowest read", "moving bytes", "plans replayed"):
        table.add_column(column, justify="right")
    for version, (records, loss) in enumerate(zip(outcome.pulls, [float("nan"), *outcome.losses], strict=True)):
        table.add_row(
            str(version),
            f"{loss:.4f}" if version else "",
            f"{sum(record.nbytes for record in records):,}",
            f"{sum(record.segments for record in records):,}",
            f"{max(record.seconds - record.wait_s for record in records) * 1e3:.1f} ms",
            f"{max(record.transfer_s for record in records) * 1e3:.1f} ms",
            f"{sum(record.plan_hit for record in records)} of {len(records)}",
        )
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; 0 when every bit arrived and both sides compute the same."""
    options = parse(argv)
    people = console(json_on_stdout=False)
    faults = FirstFault()
    try:
        outcome = asyncio.run(faults.guard(run(options)))
    except (ControlError, StoreError, DataplaneError, TimeoutError) as error:
        people.print(f"[bold red]failed[/]: {faults.explain(error)}", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        people.print("interrupted")
        return 130
    finally:
        shutdown()
    people.print(show(outcome, options))
    people.print(f"bits: {'WRONG' if outcome.wrong else 'all equal to what DTensor gathers'}")
    people.print(f"logits of both sides differ by {outcome.logits_differ_by:.2g}")
    for place in outcome.wrong:
        people.print(f"[bold red]failed[/]: wrong bits: {place}")
    return int(bool(outcome.wrong) or outcome.logits_differ_by > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
