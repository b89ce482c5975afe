"""Asynchronous reinforcement learning whose weights travel from trainer memory to generator memory.

One script learns to reverse eight digits, from nothing but a program that checks answers. Generators, a service of
replicas that are tensor parallel within, sample; judges, a service too, reward; a replay buffer hands the rollouts to
the trainers (FSDP2), which compute the next version meanwhile. After each step the generators read the new weights,
differently sharded, straight from the trainers' memory. In the middle of the run a generator is killed.

    python -m examples.rl_weight_sync                     # about a minute; two tables and rl_weight_sync.png
    python -m examples.rl_weight_sync --steps 3 --verify --json -
    python -m examples.rl_weight_sync --hosts FILE --secret-file FILE --insecure    # on machines that run an agent
    python -m examples.rl_weight_sync --job slurm:4                                 # or that an engine gives
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from rich.console import Console

# So that `python examples/rl_weight_sync.py` works as well as `python -m examples.rl_weight_sync`.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from examples import job_option
from examples.faults import FirstFault
from examples.rl import large_sync
from examples.rl.loop import History, Loop
from examples.rl.outcome import Outcome
from examples.rl.placement import Placement
from examples.rl.progress import StepLine
from examples.rl.settings import Settings
from examples.yardstick import time_memcpy
from skipper import control
from skipper import torchstore as ts
from skipper.benchmarks.errors import BenchmarkError, UsageError
from skipper.benchmarks.output import STDOUT, check_writable, console, write_json
from skipper.benchmarks.report import Result
from skipper.control import ControlError, HostMesh
from skipper.dataplane.errors import DataplaneError
from skipper.torchstore.errors import StoreError

STEPS = 50
GOAL = 0.9
"""The mean reward that a run of the usual length must reach."""

LARGE_SYNC_TEXT = """\
Here the bytes take the time. The two processes of the engine read their parts at once, each what it needs and nothing
twice, straight from the trainers' memory; nothing is packed, and no trainer takes part. So with two free cores it may
be faster than one thread's memcpy. `skipper weight-sync --model CONFIG` measures a model of yours."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with status 2 on one that makes no sense."""
    summary, _, _ = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(prog="python -m examples.rl_weight_sync", description=summary)
    parser.add_argument("--steps", type=int, metavar="N", help=f"training steps (default: {STEPS})")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of prompts and weights (default: 0)")
    parser.add_argument("--trainers", type=int, default=2, metavar="N", help="trainer processes (default: 2)")
    parser.add_argument(
        "--generators",
        type=int,
        default=2,
        metavar="N",
        choices=(1, 2, 4),
        help="processes of each replica of the generators: 1, 2 or 4 (default: 2)",
    )
    parser.add_argument("--replicas", type=int, default=2, metavar="N", help="replicas of the generators (default: 2)")
    parser.add_argument(
        "--kill-at",
        type=int,
        metavar="STEP",
        help="kill a process of a generator in this step; 0: never (default: in the middle of the "
        "run, or never when --steps is given)",
    )
    parser.add_argument(
        "--min-reward",
        type=float,
        metavar="R",
        help=f"fail when the last mean reward is lower (default: {GOAL}, or none when --steps is given)",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="cuda: each rank of a group has a GPU of its own; one "
        "GPU takes --trainers 1 --generators 1, which may share it (default: cpu)",
    )
    parser.add_argument(
        "--large-sync",
        action=argparse.BooleanOptionalAction,
        help="afterwards, sync a model of 1 GB beside a memcpy of it (default: on this host's CPUs, unless --steps is "
        "given)",
    )
    parser.add_argument("--verify", action="store_true", help="compare all received weights bit for bit")
    parser.add_argument("--json", metavar="PATH", help="write the figures there; - prints them alone on stdout")
    parser.add_argument(
        "--png", metavar="PATH", default="rl_weight_sync.png", help="the picture (default: %(default)s)"
    )
    job_option.add_arguments(parser)
    options = parser.parse_args(argv)
    if options.min_reward is None:
        options.min_reward = GOAL if options.steps is None else 0.0
    if options.kill_at is None:
        options.kill_at = STEPS // 2 if options.steps is None else 0
    here = options.hosts is None and options.job is None
    if options.large_sync is None:
        options.large_sync = options.steps is None and here and options.device == "cpu"
    options.steps = STEPS if options.steps is None else options.steps
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    if not 0 <= options.seed < 2**31:
        parser.error("--seed must be between 0 and 2147483647")
    most = Settings(options.seed).prompts
    if not 1 <= options.trainers <= most:
        parser.error(f"--trainers must be between 1 and {most}: each of them needs a prompt to learn from")
    if options.device == "cuda" and here and (why := without_gpus(max(options.trainers, options.generators))):
        parser.error(f"--device cuda: {why}")
    if options.replicas < 1:
        parser.error("--replicas must be at least 1")
    if not 0 <= options.kill_at <= options.steps:
        parser.error("--kill-at must be a step of the run, or 0")
    if options.certs is not None and not options.data_plane:
        parser.error(
            "the weights, and what the trainers tell each other, go from host to host as they are: where the network "
            "is trusted with them, add --data-plane"
        )
    try:
        check_writable(options.json)
        check_writable(options.png)
    except UsageError as error:
        parser.error(str(error))
    return options


def without_gpus(ranks: int) -> str | None:
    """Why ``ranks`` ranks cannot have a GPU each on this machine; None where they can."""
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if there >= ranks:
        return None
    wanted = "one GPU" if ranks == 1 else f"{ranks} GPUs, one for each rank of the larger group"
    return f"it takes {wanted}, and torch {torch.__version__} sees {there or 'none'} here"


async def run(options: argparse.Namespace, hosts: HostMesh, settings: Settings, line: StepLine) -> History:
    """Start everybody, turn the loop, stop everything."""
    loop = Loop(
        settings,
        Placement.over(hosts, options.trainers),
        trainers=options.trainers,
        generators=options.generators,
        replicas=options.replicas,
        kill_at=options.kill_at,
        verify=options.verify,
        on_step=line.update,
        tell=line.tell,
    )
    history = await loop.run(options.steps)
    await ts.shutdown()
    return history


def sync_large(people: Console, errors: list[str]) -> Result | None:
    """Sync a model of 1 GB, where this machine can, and say how that went; ``errors`` get what was wrong."""
    if (why := large_sync.obstacle()) is not None:
        people.print(f"no sync of a model of 1 GB: {why}")
        return None
    people.print("\nnow a sync of a model of 1 GB (--no-large-sync leaves it out)")
    try:
        row = asyncio.run(large_sync.measure())
    except (BenchmarkError, ControlError, StoreError, DataplaneError, TimeoutError, OSError, MemoryError) as error:
        errors.append(f"the sync of a model of 1 GB: {error}")
        return None
    finally:
        control.shutdown()
    people.print(large_sync.table(row))
    people.print(LARGE_SYNC_TEXT, soft_wrap=True)
    return replace(row, name="large_sync_s")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; 0 when it did what it says."""
    options = parse(argv)
    settings = Settings(seed=options.seed, device=options.device)
    people = console(json_on_stdout=options.json == STDOUT)
    faults = FirstFault()
    try:
        with job_option.hosts_of(options) as hosts, StepLine(people, options.steps) as line:
            history = asyncio.run(faults.guard(run(options, hosts, settings, line)))
    except (ControlError, StoreError, DataplaneError, TimeoutError, ValueError) as error:
        people.print(f"[bold red]failed[/]: {faults.explain(error)}", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        people.print("interrupted")
        return 130
    finally:
        control.shutdown()
    outcome = Outcome(history, time_memcpy(history.nbytes))
    people.print(outcome.table())
    people.print(outcome.explanation(), soft_wrap=True)
    outcome.draw(options.png)
    people.print(f"curves: {options.png}")
    errors: list[str] = []
    try:
        large = sync_large(people, errors) if options.large_sync else None
    except KeyboardInterrupt:
        people.print("interrupted")
        return 130
    if history.mismatched:
        errors.append(f"{history.mismatched} tensors arrived wrong")
    if history.killed and not history.restarts:
        errors.append("a generator was killed, and no replica replaced")
    if history.final_reward < options.min_reward:
        errors.append(f"the last mean reward is {history.final_reward:.3f}, below {options.min_reward}")
    for sentence in errors:
        people.print(f"[bold red]failed[/]: {sentence}")
    if options.json is not None:
        chosen = ("steps", "trainers", "generators", "replicas", "kill_at", "min_reward", "verify")
        config = {name: getattr(options, name) for name in chosen} | asdict(settings)
        report = outcome.report(sys.argv[1:] if argv is None else argv, config, errors)
        if large is not None:
            report = replace(report, results=[*report.results, large])
        write_json(report, options.json)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
