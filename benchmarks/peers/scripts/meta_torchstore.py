"""Meta's torchstore, from a checkout, on Monarch: a publisher and a reader, and a storage volume beside them."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from time import perf_counter_ns
from typing import Any

import torch
from monarch.actor import Actor, endpoint, this_host

from skipper.benchmarks.peers import state
from skipper.benchmarks.peers.protocol import Block, MeasuringTurn
from skipper.benchmarks.peers.work import Family

__all__ = ["CANNOT", "open_blocks"]

CANNOT: dict[str, str] = {}

ts: Any = importlib.import_module("torchstore")  # theirs: this script's environment does not have ours


class Holder(Actor):
    """Publishes or reads, and takes the time."""

    def __init__(self) -> None:
        self.state = state.state_dict()
        self._large: torch.Tensor | None = None
        self._batch: dict[str, torch.Tensor] = {}

    @endpoint
    async def time(self, row: str, n: int, limit_s: float) -> list[int]:
        """One turn of a row; durations in ns."""
        if row in ("put_512MiB", "get_512MiB") and self._large is None:
            self._large = state.large()
        if row.endswith("batch") and not self._batch:
            self._batch = state.batch()
        small, large, tensors, batch = state.small(), self._large, self.state, self._batch
        actions: dict[str, Callable[[], Awaitable[object]]] = {
            "put_64B": lambda: ts.put("small", small),
            "get_64B": lambda: ts.get("small"),
            "put_512MiB": lambda: ts.put("large", large),
            "get_512MiB": lambda: ts.get("large", large),
            "put_state_dict": lambda: ts.put_state_dict(tensors, "state"),
            "get_state_dict": lambda: ts.get_state_dict("state", tensors),
            "put_batch": lambda: ts.put_batch(batch),
            "get_batch": lambda: ts.get_batch(batch),
        }
        return await MeasuringTurn(n, limit_s).times_async(actions[row], warmup=state.WARMUP)

    @endpoint
    async def prepare(self, number: int) -> None:
        """The optimizer's step."""
        for tensor in self.state.values():
            tensor.fill_(number)

    @endpoint
    async def publish(self) -> int:
        """Publish what is held; the moment at which that began."""
        begin = perf_counter_ns()
        await ts.put_state_dict(self.state, "state")
        return begin

    @endpoint
    async def pull(self) -> int:
        """Read it, in place; the moment at which all was there."""
        await ts.get_state_dict("state", self.state)
        return perf_counter_ns()

    @endpoint
    async def check(self, number: int) -> None:
        """See that all is ``number``."""
        state.check(self.state, number)


def open_blocks(_family: Family, stack: ExitStack) -> dict[str, Block]:
    """See `benchmarks.peers.child`."""
    runner = stack.enter_context(asyncio.Runner())
    runner.run(ts.initialize())
    holders: Any = this_host().spawn_procs({"procs": 2}).spawn("holder", Holder)
    writer, reader = holders.slice(procs=0), holders.slice(procs=1)

    def timed(row: str) -> Block:
        def block(turn: MeasuringTurn) -> list[int]:
            who = writer
            if row.startswith("get"):
                writer.time.call_one(row.replace("get", "put"), 1, turn.limit_s).get()
                who = reader
            return list(who.time.call_one(row, turn.n, turn.limit_s).get())

        return block

    rows = (
        "put_64B",
        "get_64B",
        "put_512MiB",
        "get_512MiB",
        "put_state_dict",
        "get_state_dict",
        "put_batch",
        "get_batch",
    )
    return {
        **{row: timed(row) for row in rows},
        "sync": state.syncing(
            lambda number: writer.prepare.call_one(number).get(),
            lambda: int(writer.publish.call_one().get()),
            lambda: int(reader.pull.call_one().get()),
            lambda number: reader.check.call_one(number).get(),
        ),
    }
