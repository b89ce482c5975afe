"""A service under load whose replicas are killed, one after another.

    python -m tests.control.services.chaos --seconds 60

Sixty-four callers, half of them threads of the script and half of them tasks in actors of other processes, send one
request after another, while a replica is killed every second. Requests to an idempotent endpoint all have to be
answered. Of the others each has to end in an answer or in a typed error; none may be handled twice, what was answered
was handled, and what is said not to have been handled was not. Prints a summary as JSON; the status is 1 where
something was wrong.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from skipper import control
from skipper.control import Actor, ControlError, endpoint, idempotent, this_host
from skipper.control.model.errors import ReplicaLostError
from skipper.control.services import Service

BOUND_S = 20.0
"""Every request ends within this; most take milliseconds."""

NAME = "workers"
REPLICAS = 4
THREADS = 32
PROCESSES, TASKS = 2, 16


class Worker(Actor):
    """Answers, and writes down what must not be done twice, where a kill does not reach it."""

    def __init__(self, ledger: str) -> None:
        self.ledger = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    @endpoint
    @idempotent
    def double(self, number: int) -> int:
        return 2 * number

    @endpoint
    def note(self, mark: str) -> str:
        os.write(self.ledger, f"{mark}\n".encode())
        return mark


@dataclass
class Outcome:
    """What came of the requests of one caller, or of all."""

    doubled: int = 0
    noted: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """Of which nobody knows whether they were handled."""
    refused: list[str] = field(default_factory=list)
    """Which are said not to have been handled."""
    wrong: list[str] = field(default_factory=list)

    def add(self, other: "Outcome") -> None:
        """Take in what came to another caller."""
        self.doubled += other.doubled
        self.noted += other.noted
        self.lost += other.lost
        self.refused += other.refused
        self.wrong += other.wrong

    def failed(self, mark: str, error: Exception) -> None:
        """Take note of a request that was not answered."""
        if not isinstance(error, ReplicaLostError):
            self.wrong.append(f"{mark} ended in {type(error).__name__}: {error}")
        elif error.is_unhandled:
            self.refused.append(mark)
        else:
            self.lost.append(mark)


async def call(service: Service[Worker], name: str, is_over: Callable[[], bool]) -> Outcome:
    """One caller: a request at a time, now of the one kind and now of the other."""
    outcome, number = Outcome(), 0
    while not is_over():
        number += 1
        mark = f"{name}/{number}"
        try:
            async with asyncio.timeout(BOUND_S):
                if await service.double.route(number) != 2 * number:
                    outcome.wrong.append(f"{mark} was answered wrongly")
                outcome.doubled += 1
        except (ControlError, TimeoutError) as error:
            outcome.wrong.append(f"{mark}, idempotent, ended in {type(error).__name__}: {error}")
        try:
            async with asyncio.timeout(BOUND_S):
                if await service.note.route(mark) != mark:
                    outcome.wrong.append(f"{mark} was answered wrongly")
                outcome.noted.append(mark)
        except (ControlError, TimeoutError) as error:
            outcome.failed(mark, error)
    return outcome


class Crowd(Actor):
    """Callers in a process of their own."""

    @endpoint
    async def call(self, service: Service[Worker], name: str, tasks: int, seconds: float) -> Outcome:
        end = time.monotonic() + seconds
        outcomes = await asyncio.gather(
            *(call(service, f"{name}.{task}", lambda: time.monotonic() > end) for task in range(tasks))
        )
        whole = Outcome()
        for outcome in outcomes:
            whole.add(outcome)
        return whole


class Thread(threading.Thread):
    """A caller that is a thread of the script."""

    def __init__(self, service: Service[Worker], name: str, end: float) -> None:
        super().__init__(name=name, daemon=True)
        self._service = service
        self._end = end
        self.outcome: Outcome | None = None

    def run(self) -> None:
        """Call until it is over."""
        self.outcome = asyncio.run(call(self._service, self.name, lambda: time.monotonic() > self._end))


def kill_one(chance: random.Random, service: str = NAME) -> bool:
    """Kill one replica of a service, up or still starting; False if there is none at the moment."""
    replicas = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if child.status() != psutil.STATUS_ZOMBIE and any(f"{service}-" in word for word in child.cmdline()):
                replicas.append(child)
    if replicas:
        chance.choice(replicas).kill()
    return bool(replicas)


def judge(whole: Outcome, ledger: Path) -> None:
    """Hold what callers were told against what was done."""
    handled = Counter(ledger.read_text().split())
    whole.wrong += [f"{mark} was handled {count} times" for mark, count in handled.items() if count > 1]
    whole.wrong += [f"{mark} was answered and not handled" for mark in whole.noted if mark not in handled]
    whole.wrong += [f"{mark} was said not to be handled, and was" for mark in whole.refused if mark in handled]


def run(seconds: float, seed: int, *, every_s: float = 1.0) -> tuple[Outcome, int, list[Any]]:
    """Let it happen for so long; what came of it, how many were killed, and the service's own metrics."""
    chance, killed = random.Random(seed), 0
    with tempfile.TemporaryDirectory() as folder:
        ledger = Path(folder) / "ledger"
        service = Worker.options(num_replicas=REPLICAS, stable_s=0.0).as_service(str(ledger), name=NAME)
        crowd = this_host().spawn_procs({"crowds": PROCESSES}, name="crowd").spawn("crowd", Crowd)
        service.initialized.get(BOUND_S)
        end = time.monotonic() + seconds
        afar = [crowd.slice(crowds=n).call.call_one(service, f"crowd{n}", TASKS, seconds) for n in range(PROCESSES)]
        threads = [Thread(service, f"thread{number}", end) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        whole = Outcome()
        while time.monotonic() < end:
            killed += kill_one(chance)
            time.sleep(every_s)
        for future in afar:
            whole.add(future.get(seconds + 3 * BOUND_S))
        for thread in threads:
            thread.join(3 * BOUND_S)
            if thread.outcome is None:
                whole.wrong.append(f"{thread.name} still waits")
            else:
                whole.add(thread.outcome)
        judge(whole, ledger)
        metrics = service.metrics().get(BOUND_S)
        service.stop().get(BOUND_S)
        crowd.stop().get(BOUND_S)
        return whole, killed, metrics


def main() -> int:
    """Run it as the command line says."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.control.services.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default: %(default)s)")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between kills (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of which is killed when (default: %(default)s)")
    given = parser.parse_args()
    outcome, killed, metrics = run(given.seconds, given.seed, every_s=given.every)
    control.shutdown()
    summary = {
        "idempotent requests, all answered": outcome.doubled,
        "other requests answered": len(outcome.noted),
        "other requests that ended in ReplicaLostError": len(outcome.lost),
        "other requests refused unhandled": len(outcome.refused),
        "replicas killed": killed,
        "restarts": sum(each.restarts for each in metrics),
        "wrong": outcome.wrong[:20],
        "ok": not outcome.wrong,
    }
    sys.stdout.write(json.dumps(summary, indent=2) + "\n")
    return 0 if not outcome.wrong else 1


if __name__ == "__main__":
    sys.exit(main())
