"""The command: plays schedules, one seed after another, in several processes."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from skipper.control.runtime import peer_failures
from tests.simulation import faults, schedule
from tests.simulation.schedule import Outcome

_now = time.monotonic
"""The real clock: `worlds.install` has put another in its place by the time that schedules are played."""

_TOGETHER = 16
"""Schedules that a process plays before it says what came of them."""

_TURNS = 4
"""How often it does so before another takes its place: to find the garbage of jobs costs more than a process does."""

_SEEDS = 1000
"""Within so many each planted fault has to be found."""

_HASH_SEED = "0"

_STACK_NBYTES = 1 << 30
_DEPTH = 1_000_000


@dataclass(slots=True)
class Summary:
    """What came of many schedules."""

    schedules: int = 0
    processes: int = 0
    steps: int = 0
    answers: int = 0
    errors: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    broken: list[int] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, outcome: Outcome) -> None:
        """Count one in."""
        self.schedules += 1
        self.processes += outcome.processes
        self.steps += outcome.steps
        self.answers += outcome.answers
        self.errors += outcome.errors
        self.faults.update(outcome.faults)
        if outcome.wrong:
            self.broken.append(outcome.seed)

    def as_json(self) -> str:
        """For machines."""
        return json.dumps(
            {
                "schedules": self.schedules,
                "broken": self.broken,
                "processes": self.processes,
                "steps": self.steps,
                "answers": self.answers,
                "errors": self.errors,
                "faults": dict(sorted(self.faults.items())),
                "seconds": round(self.seconds, 1),
            }
        )


def main() -> None:
    """Play what the command line asks for; the status is 1 where an invariant was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description="Play schedules of faults.")
    parser.add_argument("--seed", type=int, nargs="+", help="play these alone, and say what breaks")
    parser.add_argument("--trace", action="store_true", help="with --seed: tell everything that befalls the job")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--count", type=int, help="how many seeds (default: as many as there is time for)")
    parser.add_argument("--seconds", type=float, help="begin no schedule after so long (default: 60, or no bound)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="how many play at a time")
    parser.add_argument("--hosts", type=int, help="how many hosts each job has (default: as the seed says)")
    parser.add_argument("--remembered", type=int, help="how many dead processes each remembers (default: as it does)")
    parser.add_argument("--plant", choices=sorted(faults.PLANTED), help="plant a fault that has to be found")
    parser.add_argument("--planted", action="store_true", help="plant each fault, and find it")
    asked = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != _HASH_SEED:
        # What iterates over sets of texts does so in the same order each time only if their hashes are the same.
        os.environ["PYTHONHASHSEED"] = _HASH_SEED
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])
    schedule.begin()
    if asked.planted:
        found = _find_planted(asked)
        print(json.dumps(found))
        sys.exit(None in found.values())
    if asked.remembered is not None:
        peer_failures._KEPT_REASONS = asked.remembered
    if asked.plant:
        faults.PLANTED[asked.plant]()
    if asked.seed is not None:
        outcomes = _play(asked.seed, asked.hosts, print if asked.trace else None)
        for outcome in outcomes:
            _tell(outcome)
            print(json.dumps({"seed": outcome.seed, "steps": outcome.steps, "digest": outcome.digest}))
        sys.exit(any(outcome.wrong for outcome in outcomes))
    summary = _play_all(asked)
    print(summary.as_json())
    sys.exit(bool(summary.broken))


def _play_all(asked: argparse.Namespace) -> Summary:
    seconds = asked.seconds if asked.seconds is not None else (60.0 if asked.count is None else float("inf"))
    summary, begin_s = Summary(), _now()

    def firsts() -> Iterator[tuple[int, int, int | None]]:
        first, end = asked.first, None if asked.count is None else asked.first + asked.count
        while (end is None or first < end) and _now() - begin_s < seconds:
            yield first, _TOGETHER if end is None else min(_TOGETHER, end - first), asked.hosts
            first += _TOGETHER

    def take(outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            summary.add(outcome)
            if outcome.wrong:
                _tell(outcome)

    with multiprocessing.get_context("fork").Pool(asked.processes, maxtasksperchild=_TURNS) as pool:
        waiting: list[Any] = []
        for each in firsts():
            waiting.append(pool.apply_async(_play_some, (each,)))
            while len(waiting) > 2 * asked.processes:
                take(waiting.pop(0).get())
        for result in waiting:
            take(result.get())
    summary.seconds = _now() - begin_s
    return summary


def _find_planted(asked: argparse.Namespace) -> dict[str, int | None]:
    """Each fault that can be planted, and the first seed that finds it; None: none does."""
    with multiprocessing.get_context("fork").Pool(asked.processes, maxtasksperchild=1) as pool:
        tasks = [(name, asked.first, asked.count or _SEEDS) for name in faults.PLANTED]
        return dict(zip(faults.PLANTED, pool.map(_find_one, tasks, chunksize=1), strict=True))


def _find_one(task: tuple[str, int, int]) -> int | None:
    name, first, count = task
    faults.PLANTED[name]()
    return next((seed for seed in range(first, first + count) if schedule.play(seed).wrong), None)


def _play_some(some: tuple[int, int, int | None]) -> list[Outcome]:
    first, count, hosts = some
    return _play(range(first, first + count), hosts)


def _play(seeds: Sequence[int], hosts: int | None, trace: Callable[[str], object] | None = None) -> list[Outcome]:
    """Play schedules; those of many hosts on a large stack, since whoever waits does so within what waited before."""
    outcomes: list[Outcome] = []

    def play() -> None:
        outcomes.extend(schedule.play(seed, hosts=hosts, trace=trace) for seed in seeds)

    if hosts is None:
        play()
        return outcomes
    threading.stack_size(_STACK_NBYTES)
    sys.setrecursionlimit(_DEPTH)
    thread = threading.Thread(target=play)
    thread.start()
    thread.join()
    return outcomes


def _tell(outcome: Outcome) -> None:
    for what in outcome.wrong:
        print(f"seed {outcome.seed}: {what}", file=sys.stderr)
    if outcome.wrong:
        print(f"again: python -m tests.simulation --seed {outcome.seed} --trace", file=sys.stderr, flush=True)
