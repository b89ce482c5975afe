"""torch.distributed.rpc: objects in workers of their own, called by ``rpc_sync`` and ``rpc_async``."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch
from torch.distributed import rpc

from skipper.benchmarks.peers.memory import Bytes, Operation, fill, holds, memory_blocks
from skipper.benchmarks.peers.protocol import Block, MeasuringTurn
from skipper.benchmarks.peers.work import FANOUT, MESSAGE_NBYTES, PIPELINED, REGION_NBYTES, Family, Span

__all__ = ["CANNOT", "open_blocks"]

CANNOT: dict[str, str] = {}

_MESSAGE = bytes(MESSAGE_NBYTES)
_TIMEOUT_S = 60.0
_own: dict[str, Bytes] = {}


def open_blocks(family: Family, stack: ExitStack) -> dict[str, Block]:
    """See `benchmarks.peers.child`."""
    os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if family == "memory":
        stack.enter_context(_Group(1))
        return memory_blocks(_Region())
    stack.enter_context(_Group(FANOUT))

    def pipeline() -> None:
        torch.futures.wait_all([rpc.rpc_async("worker1", echo, (_MESSAGE,)) for _ in range(PIPELINED)])

    def fanout() -> None:
        torch.futures.wait_all([rpc.rpc_async(f"worker{rank + 1}", echo, (_MESSAGE,)) for rank in range(FANOUT)])

    return {
        "call": lambda turn: turn.times(lambda: rpc.rpc_sync("worker1", echo, (_MESSAGE,))),
        "actor_to_actor": lambda turn: list(rpc.rpc_sync("worker2", time_calls, (turn.n, turn.limit_s))),
        "fanout": lambda turn: turn.times(fanout),
        "pipelined": lambda turn: turn.times(pipeline),
        "spawn": _time_spawns,
    }


def echo(value: bytes) -> bytes:
    """Return the argument."""
    return value


def time_calls(n: int, limit_s: float) -> list[int]:
    """Call worker 1 from here."""
    return MeasuringTurn(n, limit_s).times(lambda: rpc.rpc_sync("worker1", echo, (_MESSAGE,)))


def _time_spawns(turn: MeasuringTurn) -> list[int]:
    """A group of its own. Only a process that is in no group can make one, so one more process does it."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_spawn_group, args=(there, turn))
    process.start()
    there.close()
    durations: list[int] = here.recv()
    process.join()
    return durations


def _spawn_group(connection: Any, turn: MeasuringTurn) -> None:
    durations: list[int] = []
    begun = perf_counter_ns()
    while turn.goes_on(len(durations), begun):
        begin = perf_counter_ns()
        with _Group(FANOUT):
            torch.futures.wait_all([rpc.rpc_async(f"worker{rank + 1}", echo, (_MESSAGE,)) for rank in range(FANOUT)])
            durations.append(perf_counter_ns() - begin)
    connection.send(durations)


class _Group:
    """This process and ``count`` workers, which it starts."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._folder = tempfile.TemporaryDirectory()

    def __enter__(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        file = os.path.join(self._folder.name, "rendezvous")
        world = self._count + 1
        self._processes = [
            spawn.Process(target=_work, args=(file, rank, world), daemon=False) for rank in range(1, world)
        ]
        for process in self._processes:
            process.start()
        _join(file, 0, world)

    def __exit__(self, *_: object) -> None:
        rpc.shutdown(timeout=_TIMEOUT_S)
        for process in self._processes:
            process.join()
        self._folder.cleanup()


def _join(file: str, rank: int, world: int) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{file}", rpc_timeout=_TIMEOUT_S)
    join: Callable[..., None] = rpc.init_rpc
    join(f"worker{rank}", rank=rank, world_size=world, rpc_backend_options=options)


def _work(file: str, rank: int, world: int) -> None:
    _join(file, rank, world)
    rpc.shutdown(timeout=600.0)  # waits for the others to have done all that they want


class _Region:
    """Memory of a worker, sent as tensors."""

    def __init__(self) -> None:
        self.local: Bytes = np.zeros(REGION_NBYTES, np.uint8)
        self._tensor = torch.from_numpy(self.local)

    def operation(self, spans: Sequence[Span], *, write: bool) -> Operation:
        """One call for all spans."""
        mine = [self._tensor[offset : offset + nbytes] for offset, nbytes in spans]

        def read() -> None:
            for target, source in zip(mine, rpc.rpc_sync("worker1", give, (spans,)), strict=True):
                target.copy_(source)

        return (lambda: rpc.rpc_sync("worker1", take, (spans, mine))) if write else read

    def fill(self, spans: Sequence[Span], value: int) -> None:
        """See `Far`."""
        rpc.rpc_sync("worker1", look, (fill, spans, value))

    def holds(self, spans: Sequence[Span], value: int) -> bool:
        """See `Far`."""
        return bool(rpc.rpc_sync("worker1", look, (holds, spans, value)))


def _memory() -> Bytes:
    if "memory" not in _own:
        _own["memory"] = np.zeros(REGION_NBYTES, np.uint8)
    return _own["memory"]


def look(action: Callable[[Bytes, Sequence[Span], int], object], spans: Sequence[Span], value: int) -> object:
    """Fill the worker's memory, or compare it."""
    return action(_memory(), spans, value)


def give(spans: Sequence[Span]) -> list[torch.Tensor]:
    """Spans of the worker's memory."""
    return [torch.from_numpy(_memory()[offset : offset + nbytes]) for offset, nbytes in spans]


def take(spans: Sequence[Span], tensors: Sequence[torch.Tensor]) -> None:
    """Copy into spans of the worker's memory."""
    for (offset, nbytes), tensor in zip(spans, tensors, strict=True):
        torch.from_numpy(_memory()[offset : offset + nbytes]).copy_(tensor)
