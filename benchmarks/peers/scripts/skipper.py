"""Skipper itself: actors, memory, store and tensor engine as its own documentation has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from skipper import control, dataplane
from skipper.benchmarks.actors.parties import CallingActor, Echo
from skipper.benchmarks.peers.memory import Bytes, MemoryOwner, Operation, keep, memory_blocks
from skipper.benchmarks.peers.protocol import Block, MeasuringTurn
from skipper.benchmarks.peers.work import FANOUT, MESSAGE_NBYTES, PIPELINED, REGION_NBYTES, Family, Span
from skipper.control import ProcMesh
from skipper.dataplane import RDMAAction, RDMABuffer

__all__ = ["CANNOT", "Region", "open_blocks"]

CANNOT: dict[str, str] = {}

_MESSAGE = bytes(MESSAGE_NBYTES)
_TIMEOUT_S = 60.0


def open_blocks(family: Family, stack: ExitStack) -> dict[str, Block]:
    """See `benchmarks.peers.child`."""
    if family == "memory":
        return memory_blocks(Region(stack, mappable))
    stack.callback(control.shutdown)
    if family == "actors":
        return _actor_blocks()
    if family == "store":
        from skipper.benchmarks.peers.scripts.skipper_store import store_blocks

        return store_blocks(stack)
    return _engine_blocks(stack)


def _actor_blocks() -> dict[str, Block]:
    procs = control.this_host().spawn_procs({"procs": FANOUT})
    echoes = procs.spawn("echo", Echo)
    one = echoes.slice(procs=0)
    caller = procs.slice(procs=1).spawn("caller", CallingActor)
    echoes.noted.call().get(_TIMEOUT_S)

    def pipeline() -> None:
        futures = [one.echo.call_one(_MESSAGE) for _ in range(PIPELINED)]
        for future in futures:
            future.get(_TIMEOUT_S)

    def from_actor(turn: MeasuringTurn) -> list[int]:
        caller.time_calls.call_one(one, turn.warmup, _MESSAGE, _TIMEOUT_S).get(_TIMEOUT_S)
        durations: list[int] = caller.time_calls.call_one(one, turn.n, _MESSAGE, _TIMEOUT_S).get(_TIMEOUT_S)
        return durations

    return {
        "call": lambda turn: turn.times(lambda: one.echo.call_one(_MESSAGE).get(_TIMEOUT_S)),
        "actor_to_actor": from_actor,
        "fanout": lambda turn: turn.times(lambda: echoes.echo.call(_MESSAGE).get(_TIMEOUT_S)),
        "pipelined": lambda turn: turn.times(pipeline),
        "spawn": lambda turn: turn.times_spawn(_spawn, lambda procs: procs.stop().get(_TIMEOUT_S)),
    }


def _spawn() -> ProcMesh:
    procs = control.this_host().spawn_procs({"procs": FANOUT})
    procs.spawn("echo", Echo).noted.call().get(_TIMEOUT_S)
    return procs


def mappable(nbytes: int = REGION_NBYTES) -> Bytes:
    """Memory that other processes of this host can map."""
    return dataplane.empty_array(nbytes, np.uint8)


class Region:
    """See `benchmarks.peers.memory.Far`; ``allocate`` makes the memory of both ends."""

    def __init__(self, stack: ExitStack, allocate: Callable[[], Bytes]) -> None:
        self.local: Bytes = allocate()
        self._owner = MemoryOwner.start(stack, _own, allocate)
        self._buffer: RDMABuffer = self._owner.hello
        self.fill, self.holds = self._owner.fill, self._owner.holds

    def operation(self, spans: Sequence[Span], *, write: bool) -> Operation:
        """One action for all spans, compiled when it is first submitted."""
        action = RDMAAction()
        for offset, nbytes in spans:
            part, mine = self._buffer.at(offset, nbytes), self.local[offset : offset + nbytes]
            if write:
                action.write_remote(part, mine)
            else:
                action.read_remote(mine, part)
        return lambda: action.submit(timeout=_TIMEOUT_S).get()


def _own(connection: Connection[Any, Any], allocate: Callable[[], Bytes]) -> None:
    memory = allocate()
    buffer = RDMABuffer(memory)
    connection.send(buffer)
    keep(connection, memory)


def _engine_blocks(stack: ExitStack) -> dict[str, Block]:
    import torch

    from skipper import tensor_engine

    inspect = tensor_engine.inspect
    stack.callback(tensor_engine.shutdown)
    procs = control.this_host().spawn_procs({"gpus": 1}, env={"OMP_NUM_THREADS": "1"})
    with procs.activate():
        small, large = torch.ones(4, 4), torch.ones(16 << 20)
    inspect(large, timeout=_TIMEOUT_S)

    def issue(turn: MeasuringTurn) -> list[int]:
        durations = turn.times(lambda: small + small)
        inspect(small, timeout=_TIMEOUT_S)  # the worker has caught up before the next row
        return durations

    return {
        "issue": issue,
        "fetch_4x4": lambda turn: turn.times(lambda: inspect(small, timeout=_TIMEOUT_S)),
        "fetch_64MiB": lambda turn: turn.times(lambda: inspect(large, timeout=_TIMEOUT_S)),
    }
