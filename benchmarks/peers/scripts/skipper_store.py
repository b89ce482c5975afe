"""Skipper's rows of the store family: a publisher and a reader in processes of their own, neither the controller's."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from time import perf_counter_ns

from skipper import control, dataplane
from skipper import torchstore as ts
from skipper.benchmarks.peers import state
from skipper.benchmarks.peers.protocol import Block, MeasuringTurn
from skipper.control import Actor, endpoint

__all__ = ["store_blocks"]

_TIMEOUT_S = 120.0


class Holder(Actor):
    """Publishes or reads, and takes the time."""

    def __init__(self) -> None:
        self._held = state.StoreTensors(ts)

    @endpoint
    async def time(self, row: str, n: int, limit_s: float) -> list[int]:
        """One turn of a row; durations in ns."""
        return await self._held.times(row, n, limit_s, key="snapshot", mode="snapshot")

    @endpoint
    async def share(self) -> None:
        """Hold the tensors in memory that readers map."""
        self._held.state = state.state_dict(dataplane.empty)

    @endpoint
    async def prepare(self, number: int) -> None:
        """What an optimizer's step does: wait until nobody reads, then write."""
        if number > 1:
            await ts.fence("direct")
        for tensor in self._held.state.values():
            tensor.fill_(number)

    @endpoint
    async def publish(self) -> int:
        """Publish the tensors; returns the time when that began, in ns."""
        begin = perf_counter_ns()
        await ts.put_state_dict(self._held.state, "direct", mode="direct")
        return begin

    @endpoint
    async def pull(self) -> int:
        """Read the latest version in place; returns the time when all had arrived, in ns."""
        await ts.get_state_dict("direct", self._held.state)
        return perf_counter_ns()

    @endpoint
    async def check(self, number: int) -> None:
        """Check that every element is ``number``."""
        state.check(self._held.state, number)


def store_blocks(stack: ExitStack) -> dict[str, Block]:
    """How the rows are done."""
    control.configure(preload=["torch", "skipper.torchstore"])
    runner = stack.enter_context(asyncio.Runner())
    runner.run(ts.initialize())
    stack.callback(lambda: runner.run(ts.shutdown()))
    procs = control.this_host().spawn_procs({"procs": 2})
    holders = procs.spawn("holder", Holder)
    writer, reader = holders.slice(procs=0), holders.slice(procs=1)

    def sync(turn: MeasuringTurn) -> list[int]:
        writer.share.call_one().get(_TIMEOUT_S)
        return state.syncing(
            lambda number: writer.prepare.call_one(number).get(_TIMEOUT_S),
            lambda: writer.publish.call_one().get(_TIMEOUT_S),
            lambda: reader.pull.call_one().get(_TIMEOUT_S),
            lambda number: reader.check.call_one(number).get(_TIMEOUT_S),
        )(turn)

    timed = state.timing(
        lambda row, n, limit_s: writer.time.call_one(row, n, limit_s).get(_TIMEOUT_S),
        lambda row, n, limit_s: reader.time.call_one(row, n, limit_s).get(_TIMEOUT_S),
    )
    return {**timed, "sync": sync}
