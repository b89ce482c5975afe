"""Skipper's rows of the store family: a publisher and a reader in processes of their own, neither the controller's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from time import perf_counter_ns

import torch

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
        self.state: dict[str, torch.Tensor] = {}
        self._large: torch.Tensor | None = None
        self._batch: dict[str, torch.Tensor] = {}

    @endpoint
    async def time(self, row: str, n: int, limit_s: float) -> list[int]:
        """One turn of a row; durations in ns."""
        if row in ("put_512MiB", "get_512MiB") and self._large is None:
            self._large = state.large()
        if row.endswith("batch") and not self._batch:
            self._batch = state.batch()
        if not self.state:
            self.state = state.state_dict()
        small, large, tensors, batch = state.small(), self._large, self.state, self._batch
        actions: dict[str, Callable[[], Awaitable[object]]] = {
            "put_64B": lambda: ts.put("small", small),
            "get_64B": lambda: ts.get("small"),
            "put_512MiB": lambda: ts.put("large", large),
            "get_512MiB": lambda: ts.get("large", large),
            "put_state_dict": lambda: ts.put_state_dict(tensors, "snapshot", mode="snapshot"),
            "get_state_dict": lambda: ts.get_state_dict("snapshot", tensors),
            "put_batch": lambda: ts.put_batch(batch),
            "get_batch": lambda: ts.get_batch(batch),
        }
        return await MeasuringTurn(n, limit_s).times_async(actions[row], warmup=state.WARMUP)

    @endpoint
    async def share(self) -> None:
        """Hold the tensors in memory that readers map."""
        self.state = state.state_dict(dataplane.empty)

    @endpoint
    async def prepare(self, number: int) -> None:
        """What an optimizer's step does: wait until nobody reads, write."""
        if number > 1:
            await ts.fence("direct")
        for tensor in self.state.values():
            tensor.fill_(number)

    @endpoint
    async def publish(self) -> int:
        """Publish what is held; the moment at which that began."""
        begin = perf_counter_ns()
        await ts.put_state_dict(self.state, "direct", mode="direct")
        return begin

    @endpoint
    async def pull(self) -> int:
        """Read the latest, in place; the moment at which all was there."""
        await ts.get_state_dict("direct", self.state)
        return perf_counter_ns()

    @endpoint
    async def check(self, number: int) -> None:
        """See that all is ``number``."""
        state.check(self.state, number)


def store_blocks(stack: ExitStack) -> dict[str, Block]:
    """How the rows are done."""
    control.configure(preload=["torch", "skipper.torchstore"])
    runner = stack.enter_context(asyncio.Runner())
    runner.run(ts.initialize())
    stack.callback(lambda: runner.run(ts.shutdown()))
    procs = control.this_host().spawn_procs({"procs": 2})
    holders = procs.spawn("holder", Holder)
    writer, reader = holders.slice(procs=0), holders.slice(procs=1)

    def timed(row: str) -> Block:
        def block(turn: MeasuringTurn) -> list[int]:
            who = writer
            if row.startswith("get"):
                writer.time.call_one(row.replace("get", "put"), 1, turn.limit_s).get(_TIMEOUT_S)
                who = reader
            durations: list[int] = who.time.call_one(row, turn.n, turn.limit_s).get(_TIMEOUT_S)
            return durations

        return block

    def sync(turn: MeasuringTurn) -> list[int]:
        writer.share.call_one().get(_TIMEOUT_S)
        return state.syncing(
            lambda number: writer.prepare.call_one(number).get(_TIMEOUT_S),
            lambda: writer.publish.call_one().get(_TIMEOUT_S),
            lambda: reader.pull.call_one().get(_TIMEOUT_S),
            lambda number: reader.check.call_one(number).get(_TIMEOUT_S),
        )(turn)

    names = (
        "put_64B",
        "get_64B",
        "put_512MiB",
        "get_512MiB",
        "put_state_dict",
        "get_state_dict",
        "put_batch",
        "get_batch",
    )
    return {**{name: timed(name) for name in names}, "sync": sync}
