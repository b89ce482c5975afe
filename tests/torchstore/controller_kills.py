"""A store whose controller is killed again and again, under publishers and readers that know what they were told.

``python -m tests.torchstore.controller_kills --kills 100``: each publisher writes down, where all can see it, which
step was acknowledged; a reader that then finds an older one, or two steps in one version, has found a fault. Prints one
line of JSON, and exits with 1 if there was any.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from skipper import torchstore as ts
from skipper.control import Actor, concurrent_endpoint, shutdown, this_host
from tests.preloading import preloading

NUMEL = 1 << 18
TIMEOUT_S = 60.0
PROBE = "probe"


class Acknowledged:
    """The last step of each publisher, in a file that all processes map."""

    def __init__(self, path: str, publishers: int) -> None:
        self._steps = torch.from_file(path, shared=True, size=publishers, dtype=torch.int64)

    def __getitem__(self, publisher: int) -> int:
        return int(self._steps[publisher])

    def __setitem__(self, publisher: int, step: int) -> None:
        self._steps[publisher] = step


@dataclass
class Tally:
    """What one actor has done."""

    done: int = 0
    faults: list[str] = field(default_factory=list)
    slowest_s: float = 0.0


class _Worker(Actor):
    def __init__(self, path: str, publishers: int) -> None:
        self._acknowledged = Acknowledged(path, publishers)
        self.publishers = publishers
        self._tally = Tally()
        self._is_over = False

    @concurrent_endpoint
    async def finish(self) -> None:
        """Let `work` end."""
        self._is_over = True

    async def _timed(self, work: Any) -> Any:
        begin = time.monotonic()
        try:
            return await work
        finally:
            self._tally.slowest_s = max(self._tally.slowest_s, time.monotonic() - begin)


class Publisher(_Worker):
    """Puts one step after the other: a state dict, and the number by itself."""

    @concurrent_endpoint
    async def work(self, me: int) -> Tally:
        """Until `finish`."""
        state = {name: torch.zeros(NUMEL, dtype=torch.int64) for name in ("first", "second")}
        while not self._is_over:
            step = self._tally.done + 1
            for tensor in state.values():
                tensor.fill_(step)
            version = await self._timed(ts.put_state_dict(state, f"state-{me}", timeout=TIMEOUT_S))
            if version != step:
                self._tally.faults.append(f"step {step} of {me} is version {version}: put twice, or not at all")
            await self._timed(ts.put(f"number-{me}", step, timeout=TIMEOUT_S))
            self._acknowledged[me] = step
            self._tally.done = step
        return self._tally


class Reader(_Worker):
    """Reads what any publisher has put last."""

    @concurrent_endpoint
    async def work(self, seed: int) -> Tally:
        """Until `finish`."""
        chance = random.Random(seed)
        into = {name: torch.zeros(NUMEL, dtype=torch.int64) for name in ("first", "second")}
        while not self._is_over:
            publisher = chance.randrange(self.publishers)
            known = self._acknowledged[publisher]
            if not known:
                await asyncio.sleep(0.01)
                continue
            if chance.random() < 0.3:
                found = {int(await self._timed(ts.get(f"number-{publisher}", timeout=TIMEOUT_S)))}
            else:
                await self._timed(ts.get_state_dict(f"state-{publisher}", into, timeout=TIMEOUT_S))
                found = {int(end) for tensor in into.values() for end in tensor.aminmax()}
            if len(found) > 1:
                self._tally.faults.append(f"steps {sorted(found)} of {publisher} in one version")
            if min(found) < known:
                self._tally.faults.append(f"step {min(found)} of {publisher}, after {known} was acknowledged")
            self._tally.done += 1
        return self._tally


@dataclass
class Report:
    """What came of it.

    Attributes:
        put: Steps that were acknowledged.
        got: Reads.
        back_s: After each kill, how long it took until the store did what it was asked.
        slowest_s: Of all puts and gets.
        faults: Versions that were lost, put twice, or torn.
        left: Leases that somebody still holds, at the end.
    """

    kills: int = 0
    put: int = 0
    got: int = 0
    back_s: list[float] = field(default_factory=list)
    slowest_s: float = 0.0
    faults: list[str] = field(default_factory=list)
    left: int = 0


async def run(kills: int, publishers: int, readers: int, pause_s: float, seed: int) -> Report:
    """Kill the controller ``kills`` times while others put and get."""
    chance, report = random.Random(seed), Report()
    await ts.initialize(num_storage_volumes=2, strategy=ts.LocalRankStrategy(), journal=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "acknowledged"
        path.write_bytes(bytes(8 * publishers))
        procs = this_host().spawn_procs(per_host={"gpus": publishers + readers})
        try:
            shared = (str(path), publishers)
            working = [
                *(procs.slice(gpus=at).spawn(f"publisher-{at}", Publisher, *shared) for at in range(publishers)),
                *(procs.slice(gpus=publishers + at).spawn(f"reader-{at}", Reader, *shared) for at in range(readers)),
            ]
            await ts.put(PROBE, 0)
            calls = [actor.work.call_one(at) for at, actor in enumerate(working)]
            for number in range(1, kills + 1):
                await asyncio.sleep(chance.uniform(0.2, 1.8) * pause_s)
                await _kill(report, number)
            await asyncio.sleep(pause_s)
            await asyncio.gather(*(actor.finish.call_one() for actor in working))
            tallies = [await call for call in calls]
        finally:
            await procs.stop()
    report.put = sum(tally.done for tally in tallies[:publishers])
    report.got = sum(tally.done for tally in tallies[publishers:])
    report.faults += [fault for tally in tallies for fault in tally.faults]
    report.slowest_s = max(tally.slowest_s for tally in tallies)
    report.left = await _leases()
    await ts.shutdown()
    return report


async def _kill(report: Report, number: int) -> None:
    client = await ts.client()
    successor = await client.remote.entrance.successor.call_one(-1, TIMEOUT_S)
    os.kill(successor.process.pid, signal.SIGKILL)
    begin = time.monotonic()
    await ts.put(PROBE, number, timeout=TIMEOUT_S)
    found = await ts.get(PROBE, timeout=TIMEOUT_S)
    report.back_s.append(time.monotonic() - begin)
    report.kills += 1
    if found != number:
        report.faults.append(f"{found} was read after {number} had been put")


async def _leases() -> int:
    """How many leases the controller knows of, now that nobody reads."""
    client = await ts.client()
    deadline = time.monotonic() + 10.0
    while left := await client.remote.controller.count_leases.call_one():
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(0.1)
    return int(left)


def main(argv: list[str] | None = None) -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--publishers", type=int, default=4)
    parser.add_argument("--readers", type=int, default=8)
    parser.add_argument("--pause", type=float, default=2.0, help="seconds between two kills, in the mean")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    with preloading("torch", "skipper.torchstore"):
        try:
            report = asyncio.run(run(given.kills, given.publishers, given.readers, given.pause, given.seed))
        finally:
            shutdown()
    said = asdict(report)
    back = sorted(said.pop("back_s"))
    said["back_s"] = {"median": round(statistics.median(back), 3), "longest": round(back[-1], 3)} if back else {}
    print(json.dumps(said))
    return int(bool(report.faults or report.left))


if __name__ == "__main__":
    sys.exit(main())
