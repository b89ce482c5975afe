"""`Traced`: the script's part of a compiled call: what it assumes, its replay, and the replay's result."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from skipper.tensor_engine.errors import CompileError
from skipper.tensor_engine.script.activation import no_mesh
from skipper.tensor_engine.script.call_site import CallSite
from skipper.tensor_engine.script.guards import TraceSurroundings
from skipper.tensor_engine.script.instruction_stream import InstructionStream
from skipper.tensor_engine.script.issue import new_ref
from skipper.tensor_engine.script.tensor import Tensor, wrap
from skipper.tensor_engine.script.value import TensorStorage, Value
from skipper.tensor_engine.shared.metadata import TensorMetadata
from skipper.tensor_engine.shared.stacks import Replayed, Stack, capture

AS_IT_IS, ARGUMENT, MADE, SEQUENCE, NAMED, MAPPING = range(6)
"""Kinds of results: anything, an argument, a new tensor, and collections of results."""

_first_borrows = itertools.count(1 << 50, 1 << 20)
"""The number of the first borrow of each replay; other borrows have numbers from 1 << 40 on."""


class Made:
    """A tensor that each replay makes again.

    Attributes:
        slot: its number in the trace.
        argument: the number of the input whose value it has, as another tensor of the script, or None.
        sealed: whether it is made by `seal`.
        barred: why it cannot be used, if it was borrowed, and the function has given it back; else None.
    """

    __slots__ = ("argument", "barred", "instruction_stream", "mesh", "meta", "sealed", "slot", "storage")

    def __init__(self, value: Value, argument: int | None, sealed: bool, storage: int | TensorStorage) -> None:
        self.slot = value.ref
        self.meta: TensorMetadata = value.meta
        self.instruction_stream: InstructionStream = value.instruction_stream
        self.mesh = value.mesh
        self.argument = argument
        self.sealed = sealed
        self.barred = value.storage.barred if isinstance(storage, int) and storage < 0 else None
        self.storage = storage  # the number of an input, or of a captured tensor; below zero for a storage of its own


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """How the result of a replay is assembled.

    Attributes:
        template: its kind and parts, for `put_together`.
        made: the tensors that each replay makes again, in the template's order.
    """

    template: tuple[int, Any]
    made: list[Made]


def put_together(template: tuple[int, Any], made: Sequence[Tensor], tensors: Sequence[Tensor]) -> Any:
    """The result of a replay, assembled from new tensors and arguments."""
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
    """Makes tensors that require a gradient, and raise an error with the reason when it is computed."""

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
    """A tensor that requires a gradient."""
    with no_mesh(), torch.inference_mode(False):
        return torch.zeros(()).requires_grad_()


def seal(value: Value) -> Tensor:
    """A tensor that requires a gradient, as the function's own did. ``backward()`` raises an error with the reason."""
    with torch.enable_grad():
        sealed: Tensor = _Sealed.apply(_anchor(), value)  # type: ignore[no-untyped-call]
    return sealed


@dataclass(frozen=True, slots=True)
class ReplayPart:
    """The part of a replay for one instruction stream.

    Attributes:
        instruction_stream: the one whose workers replay it.
        site: the program.
        inputs: slots of the values that the instruction names as its inputs.
        outputs: slots of the values that it gives numbers to.
        stacks: where each instruction of the program was issued in the trace.
        borrows: whether there are parts of borrows in the program.
        is_awaited: whether another stream waits for one of these, so that it must not stay in the batch.
    """

    instruction_stream: InstructionStream
    site: CallSite
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    stacks: list[Stack]
    borrows: bool
    is_awaited: bool


@dataclass(slots=True)
class Gradients:
    """What gradients there have to be before a replay, and what there are after it.

    Attributes:
        outside: captured tensors, and whether each requires a gradient.
        expected: tensors, and the gradient that each has before a replay.
        left: tensors, and the gradient that each has after it.
        left_on_arguments: numbers of arguments, and of the new tensor that is the gradient of each; None: no gradient.
    """

    outside: list[tuple[torch.Tensor, bool]]
    expected: list[tuple[torch.Tensor, torch.Tensor | None]]
    left: list[tuple[torch.Tensor, torch.Tensor | None]]
    left_on_arguments: list[tuple[int, int | None]]

    def leave(self, tensors: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> None:
        """Set the gradients as they are after a replay.

        Args:
            tensors: the arguments.
            made: the new tensors.
        """
        for leaf, grad in self.left:
            if leaf.grad is not grad:
                leaf.grad = grad
        for index, place in self.left_on_arguments:
            tensors[index].grad = None if place is None else made[place]


@dataclass(eq=False, slots=True)
class Traced:
    """A recorded call that can be replayed; made by `trace_compiler.compile_trace`.

    Attributes:
        parts: the parts for the workers, in an order in which each waits, for a borrow, only for earlier ones.
        given: the numbers of the input tensors in the trace.
        passing: values that pass from one part to a later one and are not needed after it, with their owners.
        captured: values from outside that the function uses.
        changed: tensors from outside that it changes.
        changed_arguments: numbers of the arguments that it changes.
        kept: values that the call has left behind.
        leaves_more: whether some of these are tensors that are not gradients.
        gradients: before and after a replay.
        result: how the result is assembled.
        surroundings: the other conditions of replays.
        borrows: whether streams borrow tensors in it.
    """

    parts: list[ReplayPart]
    given: tuple[int, ...]
    passing: list[tuple[int, InstructionStream]]
    captured: list[Value]
    changed: list[Tensor]
    changed_arguments: list[int]
    kept: list[Value]
    leaves_more: bool
    gradients: Gradients
    result: ReplayResult
    surroundings: TraceSurroundings
    borrows: bool

    def __del__(self) -> None:
        # Only a note: a finalizer can run in any thread. The next batch tells the workers.
        for part in self.parts:
            part.instruction_stream.unused.append(part.site.number)

    @property
    def instruction_streams(self) -> set[InstructionStream]:
        """The instruction streams whose workers replay it."""
        return {part.instruction_stream for part in self.parts}

    def holds(self) -> bool:
        """Whether the program's assumptions still hold, except for arguments."""
        for leaf, grad in self.gradients.expected:
            if leaf.grad is not grad:
                return False
        for tensor, requires_grad in self.gradients.outside:
            if tensor.requires_grad is not requires_grad:
                return False
        return self.surroundings.hold()

    def replay(self, tensors: Sequence[Tensor]) -> Any:
        """Replay the call with other tensors.

        Raises:
            DroppedTensorError: a captured tensor has been dropped.
            BorrowedTensorError: such a tensor is lent, or one that is changed is lent to be read only.
            EngineClosedError: the engine has been shut down, or a worker is gone.
        """
        changed = [*self.changed, *(tensors[index] for index in self.changed_arguments)]
        for tensor in changed:
            tensor.remote_value.storage.refuse_change()
        for value in self.captured:
            if value.barred is not None or value.storage.barred is not None:
                value.check()
        stack = capture(2)
        first_borrow = next(_first_borrows) if self.borrows else 0
        slots = {slot: tensor.remote_value.ref for slot, tensor in zip(self.given, tensors, strict=True)}
        for part in self.parts:
            stack_here = Replayed(stack)
            stack_here.traced = part.stacks
            outputs = [new_ref() for _ in part.outputs]
            inputs = [slots[slot] for slot in part.inputs]
            constants = (first_borrow,) if part.borrows else ()
            way = part.instruction_stream
            way.put(part.site, outputs, inputs, constants, replayed=stack_here, weight=len(part.stacks))
            if part.is_awaited:
                with way.session.lock:
                    way.flush()
            slots.update(zip(part.outputs, outputs, strict=True))
        for slot, instruction_stream in self.passing:
            instruction_stream.freed.append(slots[slot])
        storages: dict[int, TensorStorage] = {}
        made = [_make(each, slots, tensors, storages) for each in self.result.made]
        if changed:
            torch.autograd.graph.increment_version(changed)
        self.gradients.leave(tensors, made)
        return put_together(self.result.template, made, tensors)


def _make(
    each: Made, slots: Mapping[int, int], tensors: Sequence[Tensor], storages: dict[int, TensorStorage]
) -> Tensor:
    if each.argument is not None:
        value = tensors[each.argument].remote_value
    else:
        storage = each.storage
        if isinstance(storage, int):
            if storage >= 0:
                storage = tensors[storage].remote_value.storage
            else:
                storage = storages.get(storage) or storages.setdefault(storage, TensorStorage())
                storage.barred = each.barred
        ref = slots[each.slot] if each.barred is None else new_ref()  # the workers have released it
        value = Value(ref, each.meta, each.instruction_stream, each.mesh, storage)
    return seal(value) if each.sealed else wrap(value)
