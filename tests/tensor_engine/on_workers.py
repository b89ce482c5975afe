"""Functions that tests have workers call."""

import os
from collections.abc import Sequence
from typing import Any

import psutil
import torch

from skipper.tensor_engine.worker.calls import FunctionCall
from skipper.tensor_engine.worker.gloo_port import GlooPort
from skipper.tensor_engine.worker.interpreter import Interpreter, Run, Site
from skipper.tensor_engine.worker.replay import Replay


def count(worker: Interpreter, value: object, argument: object) -> int:
    """How many values there are."""
    return len(worker.heap)


def stored(worker: Interpreter, value: object, argument: object) -> int:
    """Bytes of the memory of all values; that of views counts once."""
    storages = [each.untyped_storage() for each in worker.heap.values() if isinstance(each, torch.Tensor)]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def sites(worker: Interpreter, value: object, argument: object) -> int:
    """How many sites are known."""
    return len(worker._sites)


def resident(worker: Interpreter, value: object, argument: object) -> int:
    """Bytes of memory that the process has."""
    return int(psutil.Process().memory_info().rss)


def fail_on(
    worker: Interpreter, call: FunctionCall, inputs: Sequence[torch.Tensor], constant: object
) -> list[torch.Tensor]:
    """Fail on one rank; double the input on others."""
    if worker.rank == call.static:
        raise ValueError("told to fail")
    return [inputs[0] * 2]


def transposed(
    worker: Interpreter, call: FunctionCall, inputs: Sequence[torch.Tensor], constant: Any
) -> list[torch.Tensor]:
    """A sum, a constant, and nothing on rank 1."""
    return [inputs[0] + inputs[1], None if worker.rank == 1 else torch.tensor(constant)]  # type: ignore[list-item]


def die(
    worker: Interpreter, call: FunctionCall, inputs: Sequence[torch.Tensor], constant: object
) -> list[torch.Tensor]:
    """End the process of one rank."""
    if worker.rank == call.static:
        os._exit(3)
    return [inputs[0]]


def die_in_a_group(
    worker: Interpreter, call: FunctionCall, inputs: Sequence[torch.Tensor], constant: object
) -> list[torch.Tensor]:
    """Have the process of one rank end once the members of its next group have met, before it connects to any."""
    if worker.rank == call.static:
        GlooPort.let_in = lambda port: os._exit(3)  # type: ignore[assignment]
    return [inputs[0]]


def cannot_be_made(worker: Interpreter, site: Site, description: object) -> Run:
    """The maker of a site that this worker lacks something for."""
    raise ImportError("told to fail")


def programs(worker: Interpreter, value: object, argument: object) -> int:
    """How many compiled programs the worker knows."""
    return sum(isinstance(getattr(site.run, "__self__", None), Replay) for site in worker._sites.values())


def compiled_regions(worker: Interpreter, value: object, name: str) -> list[int]:
    """How many operations are in each compiled region of the newest program of a name."""
    replays = [getattr(site.run, "__self__", None) for site in worker._sites.values()]
    newest = [each for each in replays if isinstance(each, Replay) and each._program.name == name][-1]
    return [each.end - each.begin for each in newest._regions.values() if each.is_compiled]
