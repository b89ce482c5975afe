"""A service whose replicas are killed faster than they are comfortable with, while it is updated.

    python -m tests.control.services.churn --seconds 30

Thirty-two callers, three of four in other processes, send one request after another to an endpoint that is not
idempotent, a replica of four is killed every half second, up or still starting, and one rolling update follows another.
Each request writes down, where a kill does not reach it, that a replica has begun it. So it can be counted afterwards:
a request that ended in `ReplicaLostError` has to have been begun, and none may have been begun twice. (A kill may come
when a replica has just begun a request and has not come to the first line of its code, some microseconds later.)
Prints a summary as JSON; the status is 1 where something was wrong.
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from skipper import control
from skipper.control import Actor, ControlError, endpoint, idempotent, this_host
from skipper.control.model.errors import ReplicaLostError
from skipper.control.services import Service
from tests.control.services.chaos import BOUND_S, kill_one

REPLICAS = 4
_AT_THE_BEGINNING = 0.2
"""The part of the kills, at most, that come when a request has been begun and its code has not."""

PROCESSES, TASKS = 3, 8
"""Processes besides the script, and callers in each of them and in the script."""


class Worker(Actor):
    """Takes its time for each request, and writes down at once that it has begun it."""

    def __init__(self, ledger: str, work_s: float, start_s: float) -> None:
        time.sleep(start_s)
        self.ledger = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.work_s = work_s
        self.version = 0

    @endpoint
    def handle(self, mark: str) -> str:
        os.write(self.ledger, f"{mark}\n".encode())
        time.sleep(self.work_s)
        return mark

    @endpoint
    @idempotent
    def update(self, version: int) -> int:
        self.version = version
        return version


@dataclass
class Churn:
    """What came of it.

    Attributes:
        answered: the marks of the requests that were answered.
        refused: of those that ended in `ReplicaLostError`.
        not_begun: those of the refused that no replica had begun.
        slowest_s: from the call of the slowest request to its end.
        updates_s: how long each rolling update took.
        killed: replicas.
        orphans: processes that were left at the end.
        wrong: what must not be.
    """

    answered: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    not_begun: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    updates_s: list[float] = field(default_factory=list)
    killed: int = 0
    orphans: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def judge(self, ledger: Path) -> None:
        """Hold what callers were told against what was begun."""
        begun = Counter(ledger.read_text().split())
        self.not_begun = [mark for mark in self.refused if mark not in begun]
        if len(self.not_begun) > self.killed * _AT_THE_BEGINNING:
            marks = ", ".join(self.not_begun)
            self.wrong.append(
                f"{len(self.not_begun)} of {len(self.refused)} refused requests had not been begun: {marks}"
            )
        self.wrong += [f"{mark} was begun {count} times" for mark, count in begun.items() if count > 1]
        self.wrong += [f"{mark} was answered and never begun" for mark in self.answered if mark not in begun]

    def add(self, other: "Churn") -> None:
        """Take in what came to callers of another process."""
        self.answered += other.answered
        self.refused += other.refused
        self.wrong += other.wrong
        self.slowest_s = max(self.slowest_s, other.slowest_s)


async def _call(service: Service[Worker], name: str, end_s: float, churn: Churn) -> None:
    number = 0
    while time.monotonic() < end_s:
        number += 1
        mark, begun_s = f"{name}/{number}", time.monotonic()
        try:
            async with asyncio.timeout(BOUND_S):
                await service.handle.route(mark)
            churn.answered.append(mark)
        except ReplicaLostError:
            churn.refused.append(mark)
        except (ControlError, TimeoutError) as error:
            churn.wrong.append(f"{mark} ended in {type(error).__name__}: {error}")
        churn.slowest_s = max(churn.slowest_s, time.monotonic() - begun_s)


async def _call_all(service: Service[Worker], name: str, seconds: float) -> Churn:
    churn, end_s = Churn(), time.monotonic() + seconds
    await asyncio.gather(*(_call(service, f"{name}.{task}", end_s, churn) for task in range(TASKS)))
    return churn


class Crowd(Actor):
    """Callers in a process of their own."""

    @endpoint
    async def call(self, service: Service[Worker], name: str, seconds: float) -> Churn:
        return await _call_all(service, name, seconds)


def _update(service: Service[Worker], is_over: threading.Event, churn: Churn) -> None:
    version = 0
    while not is_over.is_set():
        version += 1
        begun_s = time.monotonic()
        try:
            service.update.fanout(version, rolling=1).get(3 * BOUND_S)
        except (ControlError, TimeoutError) as error:
            churn.wrong.append(f"update {version} ended in {type(error).__name__}: {error}")
        churn.updates_s.append(time.monotonic() - begun_s)


def run(
    seconds: float, seed: int, *, every_s: float = 0.5, work_s: float = 0.01, start_s: float = 0.0, **options: Any
) -> Churn:
    """Let it happen for so long."""
    churn, chance, is_over = Churn(), random.Random(seed), threading.Event()
    name = f"churned{os.getpid()}"
    with tempfile.TemporaryDirectory() as folder:
        ledger = Path(folder) / "ledger"
        service = Worker.options(num_replicas=REPLICAS, **options).as_service(str(ledger), work_s, start_s, name=name)
        crowd = this_host().spawn_procs({"crowds": PROCESSES}, name="crowd").spawn("crowd", Crowd)
        service.initialized.get(BOUND_S)
        crowd.initialized.get(BOUND_S)
        updates = threading.Thread(target=_update, args=(service, is_over, churn), daemon=True)
        updates.start()
        afar = [crowd.slice(crowds=n).call.call_one(service, f"crowd{n}", seconds) for n in range(PROCESSES)]
        with ThreadPoolExecutor(1) as pool:
            here = pool.submit(lambda: asyncio.run(_call_all(service, "script", seconds)))
            end_s = time.monotonic() + seconds
            while time.monotonic() < end_s:
                churn.killed += kill_one(chance, name)
                time.sleep(every_s)
            churn.add(here.result())
        for callers in afar:
            churn.add(callers.get(3 * BOUND_S))
        is_over.set()
        updates.join(4 * BOUND_S)
        if updates.is_alive():
            churn.wrong.append("an update still waits")
        churn.judge(ledger)
        service.stop().get(BOUND_S)
        crowd.stop().get(BOUND_S)
    churn.orphans = _replicas(name)
    churn.wrong += [f"a process is left: {words}" for words in churn.orphans]
    return churn


def _replicas(service: str) -> list[str]:
    """The replicas of a service that run, below this process or left by it."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = " ".join(process.cmdline())
            if f" {service}-" in words and process.status() != psutil.STATUS_ZOMBIE:
                found.append(words)
    return found


def main() -> int:
    """Run it as the command line says."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.control.services.churn",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="how long (default: %(default)s)")
    parser.add_argument("--every", type=float, default=0.5, help="seconds between kills (default: %(default)s)")
    parser.add_argument("--work", type=float, default=0.01, help="seconds that a request takes (default: %(default)s)")
    parser.add_argument("--start", type=float, default=0.0, help="seconds that __init__ takes (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of which is killed when (default: %(default)s)")
    parser.add_argument("--max-restarts", type=int, default=5, help="see ServiceOptions (default: %(default)s)")
    given = parser.parse_args()
    churn = run(
        given.seconds,
        given.seed,
        every_s=given.every,
        work_s=given.work,
        start_s=given.start,
        max_restarts=given.max_restarts,
    )
    control.shutdown()
    summary = {
        "requests answered": len(churn.answered),
        "requests refused": len(churn.refused),
        "of these not begun by any replica": len(churn.not_begun),
        "slowest request, s": round(churn.slowest_s, 2),
        "updates, s": [round(each, 2) for each in churn.updates_s],
        "replicas killed": churn.killed,
        "orphans": len(churn.orphans),
        "wrong": churn.wrong[:20],
        "ok": not churn.wrong,
    }
    sys.stdout.write(json.dumps(summary, indent=2) + "\n")
    return 0 if not churn.wrong else 1


if __name__ == "__main__":
    sys.exit(main())
