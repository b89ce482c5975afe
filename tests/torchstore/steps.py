"""Ranks that publish on sub-meshes at random moments, readers all the time: each version is one step, bit for bit.

``python -m tests.torchstore.steps --steps 300 --mesh ddp-tp``; with ``--kills`` publishers and readers are killed at
random, the process group is made anew and goes on after the last whole step. Prints one line of JSON.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, get_args

import torch.distributed as dist

from skipper import torchstore as ts
from skipper.control import ControlError, shutdown, this_proc
from skipper.torchstore.algebra.manifest import Mode
from tests.preloading import preloading
from tests.torchstore.step_ranks import KEY, LEFT, MeshKind, Nursery, Seen, StepRank, StepReader, prove

WAIT_S = 180.0
KEPT = 64


class World:
    """Ranks and readers in processes of their own.

    Args:
        nursery: Starts them.
        ranks: How many publish.
        readers: How many read.
    """

    def __init__(self, nursery: Any, ranks: int, readers: int) -> None:
        self.nursery = nursery
        self.ranks: list[Any] = [None] * ranks
        self.readers: list[Any] = [None] * readers
        self.pids: dict[Any, int] = {}
        self.kills = 0
        self._filling = asyncio.Lock()

    async def fill(self) -> None:
        """Start who is not there (any more)."""

        async def start(where: list[Any], at: int, what: type[Any]) -> None:
            if where[at] is None:
                actor = await self.nursery.spawn.call_one(f"{what.__name__}-{at}", what)
                self.pids[actor] = await actor.pid.call_one()  # it answers nothing while it publishes
                where[at] = actor

        async with self._filling:
            await asyncio.gather(
                *(start(self.ranks, at, StepRank) for at in range(len(self.ranks))),
                *(start(self.readers, at, StepReader) for at in range(len(self.readers))),
            )

    async def meet(self, kind: MeshKind) -> Any:
        """A new process group of all ranks. Returns what keeps it alive."""
        port = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=120))
        joins = (actor.join.call_one(port.port, rank, len(self.ranks), kind) for rank, actor in enumerate(self.ranks))
        await asyncio.gather(*joins)
        return port

    def kill(self, where: list[Any], at: int) -> None:
        """SIGKILL for one of them."""
        actor, where[at] = where[at], None
        if actor is not None:
            os.kill(self.pids.pop(actor), signal.SIGKILL)
            self.kills += 1


@asynccontextmanager
async def world(ranks: int, readers: int) -> AsyncIterator[World]:
    """A store, and processes."""
    await ts.initialize()
    nursery = this_proc().spawn("nursery", Nursery)
    try:
        found = World(nursery, ranks, readers)
        await found.fill()
        yield found
    finally:
        await nursery.stop()
        await ts.shutdown()


async def publish(there: World, kind: MeshKind, steps: int, mode: Mode, *, delay_s: float, kills: int = 0) -> Seen:
    """Publish so many steps under `KEY`, read them, and say what was read; ``errors`` counts killed readers too."""
    keep = KEPT if mode == "snapshot" else None
    dice, total, start, left = random.Random(), Seen(), 1, kills

    async def watch(at: int) -> None:
        while True:
            try:
                seen = await asyncio.wait_for(_answer(there.readers[at].watch.call_one(steps, mode)), WAIT_S + steps)
            except ControlError:
                total.errors += 1
                there.readers[at] = None
                await there.fill()
                continue
            total.steps.update(seen.steps)
            total.mixed += seen.mixed
            total.longest_s = max(total.longest_s, seen.longest_s)
            return

    readers = [asyncio.create_task(watch(at)) for at in range(len(there.readers))]
    while True:
        group = await there.meet(kind)
        puts = [
            asyncio.create_task(_answer(actor.publish.call_one(start, steps, mode, delay_s, keep)))
            for actor in there.ranks
        ]
        if left:
            await asyncio.sleep(delay_s * (2 + dice.random() * steps / (kills + 1)))
            left -= 1
            there.kill(there.ranks, dice.randrange(len(there.ranks)))
            group.add(LEFT, 1)
            if left % 2 and there.readers:
                there.kill(there.readers, dice.randrange(len(there.readers)))
        outcomes = await asyncio.gather(*puts, return_exceptions=True)
        unexpected = [outcome for outcome in outcomes if isinstance(outcome, Exception) and not kills]
        if unexpected:
            raise unexpected[0]
        if all(outcome == "" for outcome in outcomes):
            break
        await there.fill()
        start = await _newest_step() + 1
        if start > steps:
            break
    await asyncio.wait_for(asyncio.gather(*readers), WAIT_S)
    return total


async def _answer(call: Any) -> Any:
    return await call


async def _newest_step() -> int:
    """The step of the newest whole version; 0 if there is none that can be read."""
    seen = Seen()
    try:
        prove(seen, 1, await ts.get_state_dict(KEY))
    except ts.StoreError:
        return 0
    return seen.steps[1]


async def run(kind: MeshKind, steps: int, mode: Mode, ranks: int, readers: int, kills: int) -> dict[str, Any]:
    """The whole run, in figures."""
    begun = time.perf_counter()
    async with world(ranks, readers) as there:
        seen = await publish(there, kind, steps, mode, delay_s=0.01, kills=kills)
        killed = there.kills
    return {
        "mesh": kind,
        "mode": mode,
        "ranks": ranks,
        "readers": readers,
        "steps": steps,
        "versions_read": len(seen.steps),
        "mixed": len(seen.mixed),
        "lost": lost(seen, steps, mode, kills),
        "kills": killed,
        "longest_wait_s": round(seen.longest_s, 2),
        "seconds": round(time.perf_counter() - begun, 1),
        "what_was_mixed": seen.mixed[:3],
    }


def lost(seen: Seen, steps: int, mode: Mode, kills: int) -> int:
    """Steps that nobody could read; with deaths, and where only the newest version is kept, the last one counts."""
    wanted = {steps} if mode == "direct" or kills else set(range(1, steps + 1))
    return len(wanted - set(seen.steps.values()))


def main() -> int:
    """1 when a version was mixed or lost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--mesh", choices=get_args(MeshKind), default="ddp-tp")
    parser.add_argument("--mode", choices=get_args(Mode), default="snapshot")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--readers", type=int, default=2)
    parser.add_argument("--kills", type=int, nargs="?", const=8, default=0)
    options = parser.parse_args()
    try:
        with preloading("torch", "tests.torchstore.step_ranks"):
            work = run(options.mesh, options.steps, options.mode, options.ranks, options.readers, options.kills)
            report = asyncio.run(work)
    finally:
        shutdown()
    print(json.dumps(report), flush=True)
    return int(bool(report["mixed"] or report["lost"]))


if __name__ == "__main__":
    sys.exit(main())
