"""How streams of a worker hand a tensor to each other: the workers' part of borrowing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from skipper.tensor_engine.worker.calls import FunctionCall
from skipper.tensor_engine.worker.device import follow, mark
from skipper.tensor_engine.worker.interpreter import Interpreter
from skipper.tensor_engine.worker.rendezvous_point import forget, point_of


def lend(worker: Interpreter, call: FunctionCall, inputs: Sequence[Any], constant: int) -> list[Any]:
    """On the owner's stream: everything before has been issued, so the borrower may begin."""
    point_of((worker.session, constant)).given.set_result((inputs[0], _event(inputs[0])))
    return []


def take(worker: Interpreter, call: FunctionCall, inputs: Sequence[Any], constant: int) -> list[Any]:
    """On the borrower's stream: wait for the owner to be as far, and take the tensor."""
    value, event = point_of((worker.session, constant)).given.result()
    follow(event)
    return [value.detach() if isinstance(value, torch.Tensor) else value]


def give_back(worker: Interpreter, call: FunctionCall, inputs: Sequence[Any], constant: int) -> list[Any]:
    """On the borrower's stream: nothing follows that uses the tensor."""
    point_of((worker.session, constant)).returned.set_result(_event(inputs[0]))
    return []


def get_back(worker: Interpreter, call: FunctionCall, inputs: Sequence[Any], constant: int) -> list[Any]:
    """On the owner's stream: wait for the borrower to be done. Until then the rendezvous point holds the memory."""
    key = (worker.session, constant)
    follow(point_of(key).returned.result())
    forget(key)
    return []


def use_own_cuda_stream() -> None:
    """Give this thread, which runs a stream of the script, a CUDA stream of its own, if there is a GPU."""
    if torch.cuda.is_available():
        torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]


def _event(value: Any) -> torch.cuda.Event | None:
    return mark() if isinstance(value, torch.Tensor) and value.is_cuda else None
