"""Monarch: actors, `RDMABuffer`, tensor engine."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import monarch
import torch
from monarch.actor import Actor, endpoint, this_host
from monarch.rdma import RDMAAction, RDMABuffer

from skipper.benchmarks.peers.memory import Bytes, Operation, fill, holds, memory_blocks
from skipper.benchmarks.peers.protocol import Block, MeasuringTurn
from skipper.benchmarks.peers.work import FANOUT, MESSAGE_NBYTES, PIPELINED, REGION_NBYTES, Family, Span

__all__ = ["CANNOT", "open_blocks"]

CANNOT: dict[str, str] = {}

_MESSAGE = bytes(MESSAGE_NBYTES)
_TIMEOUT_S = 60


def open_blocks(family: Family, _stack: ExitStack) -> dict[str, Block]:
    """See `benchmarks.peers.child`."""
    warnings.simplefilter("ignore")  # its own, of the TCP fallback and of deprecations
    if family == "actors":
        return _actor_blocks()
    if family == "memory":
        return memory_blocks(_Region())
    return _engine_blocks()


class Echo(Actor):
    """Answers at once."""

    @endpoint
    def echo(self, value: bytes) -> bytes:
        """Return the argument."""
        return value

    @endpoint
    def time_calls(self, other: Any, n: int, limit_s: float) -> list[int]:
        """Call another actor from here."""
        return MeasuringTurn(n, limit_s).times(lambda: other.echo.call_one(_MESSAGE).get())


def _actor_blocks() -> dict[str, Block]:
    procs = this_host().spawn_procs({"procs": FANOUT})
    echoes: Any = procs.spawn("echo", Echo)
    one, two = echoes.slice(procs=0), echoes.slice(procs=1)
    echoes.echo.call(_MESSAGE).get()

    def pipeline() -> None:
        futures = [one.echo.call_one(_MESSAGE) for _ in range(PIPELINED)]
        for future in futures:
            future.get()

    return {
        "call": lambda turn: turn.times(lambda: one.echo.call_one(_MESSAGE).get()),
        "actor_to_actor": lambda turn: two.time_calls.call_one(one, turn.n, turn.limit_s).get(),
        "fanout": lambda turn: turn.times(lambda: echoes.echo.call(_MESSAGE).get()),
        "pipelined": lambda turn: turn.times(pipeline),
        "spawn": lambda turn: turn.times_spawn(_spawn, lambda procs: procs.stop().get()),
    }


def _spawn() -> Any:
    procs = this_host().spawn_procs({"procs": FANOUT})
    echoes: Any = procs.spawn("echo", Echo)
    echoes.echo.call(_MESSAGE).get()
    return procs


class Owner(Actor):
    """Owns memory."""

    def __init__(self) -> None:
        self._memory = torch.zeros(REGION_NBYTES, dtype=torch.uint8)

    @endpoint
    def buffers(self, spans: Sequence[Span]) -> list[RDMABuffer]:
        """A buffer for each span."""
        return [RDMABuffer(self._memory[offset : offset + nbytes]) for offset, nbytes in spans]

    @endpoint
    def fill(self, spans: Sequence[Span], value: int) -> None:
        """See `Far`."""
        fill(self._memory.numpy(), spans, value)

    @endpoint
    def holds(self, spans: Sequence[Span], value: int) -> bool:
        """See `Far`."""
        return holds(self._memory.numpy(), spans, value)


class _Region:
    def __init__(self) -> None:
        monarch.configure(rdma_allow_tcp_fallback=True)
        self._tensor = torch.zeros(REGION_NBYTES, dtype=torch.uint8)
        self.local: Bytes = self._tensor.numpy()
        self._owner: Any = this_host().spawn_procs({"procs": 1}).spawn("owner", Owner)

    def operation(self, spans: Sequence[Span], *, write: bool) -> Operation:
        """One action for all spans."""
        buffers = self._owner.buffers.call_one(spans).get()
        mine = [self._tensor[offset : offset + nbytes] for offset, nbytes in spans]
        if len(spans) == 1:
            transfer = buffers[0].write_from if write else buffers[0].read_into
            return lambda: transfer(mine[0], timeout=_TIMEOUT_S).get()
        action = RDMAAction()
        for here, there in zip(mine, buffers, strict=True):
            if write:
                action.write_remote(there, here)
            else:
                action.read_remote(here, there)
        return lambda: action.submit(timeout=_TIMEOUT_S).get()

    def fill(self, spans: Sequence[Span], value: int) -> None:
        """See `Far`."""
        self._owner.fill.call_one(spans, value).get()

    def holds(self, spans: Sequence[Span], value: int) -> bool:
        """See `Far`."""
        return bool(self._owner.holds.call_one(spans, value).get())


def _engine_blocks() -> dict[str, Block]:
    procs: Any = this_host().spawn_procs({"gpus": 1})
    mesh = procs
    with mesh.activate():
        small, large = torch.ones(4, 4), torch.ones(16 << 20)

        def fetch(tensor: Any) -> Any:
            with mesh.activate():
                return monarch.fetch_shard(tensor).result()

        def issue(turn: MeasuringTurn) -> list[int]:
            with mesh.activate():
                durations = turn.times(lambda: small + small)
            fetch(small)  # the worker has caught up before the next row
            return durations

    return {
        "issue": issue,
        "fetch_4x4": lambda turn: turn.times(lambda: fetch(small)),
        "fetch_64MiB": lambda turn: turn.times(lambda: fetch(large)),
    }
