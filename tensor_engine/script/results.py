"""What a compiled function returns, put together from the tensors that a replay makes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from skipper.tensor_engine.errors import CompileError
from skipper.tensor_engine.script.activation import no_mesh
from skipper.tensor_engine.script.instruction_stream import InstructionStream
from skipper.tensor_engine.script.tensor import Tensor, wrap
from skipper.tensor_engine.script.value import TensorStorage, Value
from skipper.tensor_engine.shared.metadata import TensorMetadata

AS_IT_IS, ARGUMENT, MADE, SEQUENCE, NAMED, MAPPING = range(6)
"""Kinds of results: anything, an argument, a new tensor, and collections of results."""


class Made:
    """A tensor that each replay makes anew.

    Attributes:
        slot: its number in the trace.
        argument: the number of the input that it is another tensor of the script for, or None.
        sealed: whether it is made by `seal`.
    """

    __slots__ = ("argument", "instruction_stream", "mesh", "meta", "sealed", "slot", "storage")

    def __init__(self, value: Value, argument: int | None, sealed: bool, storage: int | TensorStorage) -> None:
        self.slot = value.ref
        self.meta: TensorMetadata = value.meta
        self.instruction_stream: InstructionStream = value.instruction_stream
        self.mesh = value.mesh
        self.argument = argument
        self.sealed = sealed
        self.storage = storage  # of an input, below zero one of its own, or that of a captured tensor


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """How the result of a replay is put together.

    Attributes:
        template: of what: see `put_together`.
        made: the tensors that each replay makes anew, in the order in which the template numbers them.
    """

    template: tuple[int, Any]
    made: list[Made]


def put_together(template: tuple[int, Any], made: Sequence[Tensor], tensors: Sequence[Tensor]) -> Any:
    """The result of a replay, of new tensors and of arguments."""
    kind, what = template
    if kind == MADE:
        return made[what]
    if kind == ARGUMENT:
        return tensors[what]
    if kind == AS_IT_IS:
        return what
    if kind == MAPPING:
        return what[0]({name: put_together(each, made, tensors) for name, each in what[1].items()})
    items = [put_together(each, made, tensors) for each in what[1]]
    return what[0](*items) if kind == NAMED else what[0](items)


class _Sealed(torch.autograd.Function):
    """Makes tensors that require a gradient, and raise an error with the reason when it is asked for."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, value: Value) -> Tensor:
        return wrap(value)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> NoReturn:
        raise CompileError(
            "this tensor comes from a compiled function, through which gradients do not flow: call backward() inside it"
        )


@functools.cache
def _anchor() -> torch.Tensor:
    """Something that requires a gradient."""
    with no_mesh(), torch.inference_mode(False):
        return torch.zeros(()).requires_grad_()


def seal(value: Value) -> Tensor:
    """A tensor that requires a gradient, as the function's own did. ``backward()`` raises an error with the reason."""
    with torch.enable_grad():
        sealed: Tensor = _Sealed.apply(_anchor(), value)  # type: ignore[no-untyped-call]
    return sealed
