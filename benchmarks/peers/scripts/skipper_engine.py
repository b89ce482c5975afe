"""Skipper's rows of the engine family: one worker."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from skipper import control, tensor_engine
from skipper.benchmarks.peers.protocol import Block, MeasuringTurn
from skipper.tensor_engine import inspect

__all__ = ["engine_blocks"]

_TIMEOUT_S = 60.0


def engine_blocks(stack: ExitStack) -> dict[str, Block]:
    """How the rows are done."""
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
