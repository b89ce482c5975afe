"""Meta's torchstore, from a checkout, on Monarch: a publisher, a reader and a storage volume."""

from __future__ import annotations

import asyncio
import importlib
from contextlib import ExitStack
from time import perf_counter_ns
from typing import Any

from monarch.actor import Actor, endpoint, this_host

from skipper.benchmarks.peers import state
from skipper.benchmarks.peers.protocol import Block
from skipper.benchmarks.peers.work import Family

__all__ = ["CANNOT", "open_blocks"]

CANNOT: dict[str, str] = {}

ts: Any = importlib.import_module("torchstore")  # theirs: this script's environment does not have ours


class Holder(Actor):
    """Publishes or reads, and takes the time."""

    def __init__(self) -> None:
        self._held = state.StoreTensors(ts)
        self._held.state = state.state_dict()

    @endpoint
    async def time(self, row: str, n: int, limit_s: float) -> list[int]:
        """One turn of a row; durations in ns."""
        return await self._held.times(row, n, limit_s, key="state")

    @endpoint
    async def prepare(self, number: int) -> None:
        """The optimizer's step."""
        for tensor in self._held.state.values():
            tensor.fill_(number)

    @endpoint
    async def publish(self) -> int:
        """Publish the tensors; returns the time when that began, in ns."""
        begin = perf_counter_ns()
        await ts.put_state_dict(self._held.state, "state")
        return begin

    @endpoint
    async def pull(self) -> int:
        """Read them in place; returns the time when all had arrived, in ns."""
        await ts.get_state_dict("state", self._held.state)
        return perf_counter_ns()

    @endpoint
    async def check(self, number: int) -> None:
        """Check that every element is ``number``."""
        state.check(self._held.state, number)


def open_blocks(_family: Family, stack: ExitStack) -> dict[str, Block]:
    """See `benchmarks.peers.child`."""
    runner = stack.enter_context(asyncio.Runner())
    runner.run(ts.initialize())
    holders: Any = this_host().spawn_procs({"procs": 2}).spawn("holder", Holder)
    writer, reader = holders.slice(procs=0), holders.slice(procs=1)

    return {
        **state.timing(
            lambda row, n, limit_s: list(writer.time.call_one(row, n, limit_s).get()),
            lambda row, n, limit_s: list(reader.time.call_one(row, n, limit_s).get()),
        ),
        "sync": state.syncing(
            lambda number: writer.prepare.call_one(number).get(),
            lambda: int(writer.publish.call_one().get()),
            lambda: int(reader.pull.call_one().get()),
            lambda number: reader.check.call_one(number).get(),
        ),
    }
