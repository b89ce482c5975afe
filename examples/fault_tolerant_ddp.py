"""Data-parallel training that goes on while its processes are killed, crash, freeze and lose their links.

Replica groups train together. Every so often one of their processes dies; the others make the next step without it,
with the whole batch, and what replaces it reads weights and moments from a healthy group's memory and joins in. In the
end the losses of all steps are compared with those of a run to which nothing happened: they are the same.

    python -m examples.fault_tolerant_ddp                         # a minute, 30 deaths of all kinds
    python -m examples.fault_tolerant_ddp --deaths 1000 --every 1.2 --groups 4
    python -m examples.fault_tolerant_ddp --kinds kill,stop --at-once 2 --json -
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

# So that `python examples/fault_tolerant_ddp.py` works as well as `python -m examples.fault_tolerant_ddp`.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from examples.fault_tolerance.coordinator import QuorumLostError
from examples.fault_tolerance.loop import Settings, UnnoticedError, policy_of, train, undisturbed
from examples.fault_tolerance.outcome import Comparison, Outcome
from examples.fault_tolerance.progress import ProgressLine
from examples.fault_tolerance.record import Record
from examples.fault_tolerance.saboteur import DEATHS, HOST
from examples.fault_tolerance.task import Task
from examples.faults import FirstFault
from examples.job_option import add_arguments, hosts_of
from skipper import control
from skipper.benchmarks.errors import UsageError
from skipper.benchmarks.output import STDOUT, check_writable, console, write_json
from skipper.control import ActorError, ControlError, HostMesh, shutdown
from skipper.control.cluster.recovery import RecoveryPolicy

PRELOADED = ("torch", "torch._dynamo", "skipper.dataplane")
"""The second one takes a second of a CPU, and is imported by the first optimizer that is made."""


NUMBERS: tuple[tuple[str, type[int] | type[float], float, str], ...] = (
    ("--steps", int, 1000, "steps, more if the deaths take longer"),
    ("--groups", int, 3, "replica groups"),
    ("--procs", int, 1, "processes of each group"),
    ("--deaths", int, 30, "how many processes die"),
    ("--every", float, 2.0, "seconds from one moment of death to the next"),
    ("--at-once", int, 1, "groups that are hit in such a moment"),
    ("--deadline", float, 1.0, "seconds after which a process counts as frozen, and is replaced"),
    ("--pace", float, 0.02, "seconds from a step to the next, at least"),
    ("--checkpoint-every", int, 0, "steps between copies that the script keeps, for when all groups die; 0: none"),
    ("--seed", int, 0, "of data, weights and deaths"),
)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with status 2 on one that makes no sense."""
    summary, _, _ = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(prog="python -m examples.fault_tolerant_ddp", description=summary)
    for name, kind, default, text in NUMBERS:
        unit = "N" if kind is int else "S"
        parser.add_argument(name, type=kind, default=default, metavar=unit, help=f"{text} (default: %(default)s)")
    usual = ",".join(kind for kind in DEATHS if kind != HOST)
    text = f"ways to die (default: %(default)s; with --job also {HOST})"
    parser.add_argument("--kinds", default=usual, metavar="K,K", help=text)
    parser.add_argument("--no-compare", action="store_true", help="do without the undisturbed run in the end")
    parser.add_argument("--max-mean-recovery", type=float, metavar="S", help="fail when it takes longer in the mean")
    parser.add_argument("--json", metavar="PATH", help="write the figures there; - prints them alone on stdout")
    add_arguments(parser)
    options = parser.parse_args(argv)
    options.kinds = tuple(options.kinds.split(","))
    if complaint := _complaint(options):
        parser.error(complaint)
    try:
        check_writable(options.json)
    except UsageError as error:
        parser.error(str(error))
    return options


def _complaint(options: argparse.Namespace) -> str:
    """What makes no sense; empty where all does."""
    if min(options.steps, options.groups, options.procs) < 1:
        return "--steps, --groups and --procs must be at least 1"
    if min(options.deaths, options.checkpoint_every, options.pace) < 0:
        return "--deaths, --checkpoint-every and --pace must not be negative"
    if min(options.every, options.deadline) <= 0:
        return "--every and --deadline must be positive"
    if not 1 <= options.at_once <= options.groups:
        return "--at-once must be between 1 and the number of groups"
    if not 0 <= options.seed < 2**31:
        return "--seed must be between 0 and 2147483647"
    if options.groups * options.procs > Task().batch:
        return f"there is one batch of {Task().batch} samples for all processes: have fewer of them"
    if HOST in options.kinds and (options.job is None or options.job.size < options.groups):
        return f"--kinds {HOST} needs a --job of as many hosts as there are groups, or more"
    unknown = [kind for kind in options.kinds if kind not in DEATHS]
    return f"--kinds: nobody dies by {', '.join(unknown)}; known are {', '.join(DEATHS)}" if unknown else ""


def settings_of(options: argparse.Namespace) -> Settings:
    """The run that a command line asks for."""
    return Settings(
        task=Task(seed=options.seed),
        steps=options.steps,
        groups=options.groups,
        procs=options.procs,
        deaths=options.deaths,
        kinds=options.kinds,
        at_once=options.at_once,
        every_s=options.every,
        deadline_s=options.deadline,
        pace_s=options.pace,
        checkpoint_every=options.checkpoint_every,
    )


async def run(
    settings: Settings, hosts: HostMesh, policy: RecoveryPolicy, line: ProgressLine, *, is_compared: bool
) -> Outcome:
    """Train while processes die, and once more while none does."""
    record = Record(settings.groups)
    learned = await train(settings, hosts, policy, record, line.update)
    comparison = None
    if is_compared:
        line.say("the same without deaths")
        comparison = Comparison.of(record, learned, *await undisturbed(settings, learned.step))
    return Outcome(record, learned, comparison)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; 0 when it did what it says."""
    options = parse(argv)
    settings = settings_of(options)
    people = console(json_on_stdout=options.json == STDOUT)
    # Those that take the place of the dead are forked from a process that has imported these: all that they need.
    control.configure(preload=PRELOADED)
    faults = FirstFault()
    try:
        with hosts_of(options) as hosts, ProgressLine(people, settings) as line:
            work = run(settings, hosts, policy_of(options.job, hosts), line, is_compared=not options.no_compare)
            outcome = asyncio.run(faults.guard(work))
    except (ControlError, UnnoticedError, TimeoutError) as error:
        lost = error.cause if isinstance(error, ActorError) and isinstance(error.cause, QuorumLostError) else None
        people.print(f"[bold red]failed[/]: {lost or faults.explain(error)}", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        people.print("interrupted")
        return 130
    finally:
        shutdown()
    people.print(outcome.table())
    if outcome.record.faults:
        people.print(outcome.recovery_table())
    errors = outcome.errors(options.max_mean_recovery)
    for sentence in errors:
        people.print(f"[bold red]failed[/]: {sentence}")
    if options.json is not None:
        config = {name: value for name, value in asdict(settings).items() if name != "task"} | asdict(settings.task)
        config["kinds"] = ",".join(settings.kinds)
        write_json(outcome.report(sys.argv[1:] if argv is None else argv, config, errors), options.json)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
