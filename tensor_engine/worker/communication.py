"""The workers' part of reductions and of moves between meshes: the functions that instructions call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from skipper.tensor_engine.errors import CommunicationError
from skipper.tensor_engine.shared.metadata import TensorMetadata
from skipper.tensor_engine.shared.reductions import STACK
from skipper.tensor_engine.worker import collectives
from skipper.tensor_engine.worker.calls import FunctionCall
from skipper.tensor_engine.worker.device import local
from skipper.tensor_engine.worker.groups import Group, Groups
from skipper.tensor_engine.worker.heap import Poison, poison_storage
from skipper.tensor_engine.worker.interpreter import Interpreter
from skipper.tensor_engine.worker.point_to_point import transfer

_RANKS = 1 << 20


def worker_number(session: int, rank: int) -> int:
    """The number of a worker, unique in the script."""
    return session * _RANKS + rank


@dataclass(frozen=True, slots=True, eq=False)
class WorkerNumbers:
    """The numbers of the workers of a session, by rank. Equal only to itself: a rejoin makes a new one.

    Attributes:
        by_rank: the numbers.
        ages: the life of the session in which each worker came: 0 is the first one.
    """

    by_rank: tuple[int, ...]
    ages: tuple[int, ...]

    @staticmethod
    def first(session: int, count: int) -> WorkerNumbers:
        """The numbers of a new session."""
        return WorkerNumbers(tuple(worker_number(session, rank) for rank in range(count)), (0,) * count)

    def renewed(self, life: int, ranks: Sequence[int]) -> WorkerNumbers:
        """The numbers with new workers at these ranks; ``life`` is a number like that of a session."""
        numbers, ages = list(self.by_rank), list(self.ages)
        for rank in ranks:
            numbers[rank], ages[rank] = worker_number(life, rank), max(self.ages) + 1
        return WorkerNumbers(tuple(numbers), tuple(ages))


@dataclass(frozen=True, slots=True, eq=False)
class Reduction:
    """A reduction, described once for workers. Equal only to itself: the script makes each of them once.

    Attributes:
        groups: the numbers of the workers that reduce together.
        kind: the reduction.
        scatter: whether each gets a part of the result.
        expected: metadata of the values.
        to: the numbers of the workers that need the result; None for all.
    """

    groups: tuple[tuple[int, ...], ...]
    kind: str
    scatter: bool
    expected: TensorMetadata
    to: frozenset[int] | None = None

    def result_shape(self) -> tuple[int, ...]:
        """The shape of each worker's result."""
        shape, size = self.expected.shape, len(self.groups[0])
        if self.kind == STACK:
            return shape if self.scatter else (size, *shape)
        return (shape[0] // size, *shape[1:]) if self.scatter else shape


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """A move from one mesh to another, described once for workers. Equal only to itself.

    Attributes:
        groups: for each sender its number, followed by the numbers of its receivers, without its own.
        expected: metadata of the values.
    """

    groups: tuple[tuple[int, ...], ...]
    expected: TensorMetadata


def reduce(worker: Interpreter, call: FunctionCall, inputs: Sequence[Any], constant: None) -> list[Any]:
    """Reduce ``inputs[0]`` over the groups of the `Reduction`; into ``inputs[-1]`` if the call has no outputs."""
    plan: Reduction = call.static
    group = _group(worker, plan)
    if call.outputs:
        return [_reduce(group, plan, inputs[0], None)]
    _note_written(worker, inputs[-1], _reduce(group, plan, inputs[0], inputs[-1]))
    return []


def reduce_together(worker: Interpreter, call: FunctionCall, inputs: Sequence[Any], constant: None) -> list[Any]:
    """Reduce several values, each as its `Reduction` says, over the same groups and by the same reduction.

    If the call has no outputs, the values are followed by as many inputs that get the results.
    """
    plans: tuple[Reduction, ...] = call.static
    values, targets = inputs[: len(plans)], inputs[len(plans) :] or [None] * len(plans)
    into = [target if isinstance(target, torch.Tensor) else None for target in targets]
    expected = [plan.expected for plan in plans]
    found = collectives.all_reduce_together(_group(worker, plans[0]), values, expected, plans[0].kind, into=into)
    results = [worker.poison(call.name, each) if isinstance(each, CommunicationError) else each for each in found]
    if call.outputs:
        return results
    for target, result in zip(targets, results, strict=True):
        _note_written(worker, target, result)
    return []


def _note_written(worker: Interpreter, target: Any, result: Any) -> None:
    """If a result is poison, also put that poison in place of the target."""
    if isinstance(result, Poison) and isinstance(target, torch.Tensor):
        poison_storage(worker.heap, target, result)


def send(worker: Interpreter, call: FunctionCall, inputs: Sequence[Any], constant: None) -> list[Any]:
    """Send ``inputs[0]`` to the receivers, without waiting for them."""
    plan: Move = call.static
    for group in _meet(worker, plan):
        if group.rank == 0:
            transfer(group, inputs[0], plan.expected)
    return []


def receive(worker: Interpreter, call: FunctionCall, inputs: Sequence[Any], constant: None) -> list[Any]:
    """Receive the value of a sender. A worker that already has the value copies ``inputs[0]``."""
    plan: Move = call.static
    for group in _meet(worker, plan):
        if group.rank:
            return [transfer(group, None, plan.expected)]
    kept = inputs[0]
    return [kept.clone(memory_format=torch.contiguous_format) if isinstance(kept, torch.Tensor) else kept]


def restore(worker: Interpreter, call: FunctionCall, inputs: Sequence[Any], constant: None) -> list[Any]:
    """``inputs[0]``; if this worker has none, the value of its group's sender, with the original layout."""
    plan: Move = call.static
    kept, got = inputs[0], None
    for group in _meet(worker, plan):
        got = transfer(group, None if group.rank else kept, plan.expected)
        got = got if group.rank else None
    if got is None or isinstance(kept, torch.Tensor):
        return [kept.detach() if isinstance(kept, torch.Tensor) else kept]
    return [_laid_out(got, call.outputs[0]) if isinstance(got, torch.Tensor) else got]


def overwrite(worker: Interpreter, call: FunctionCall, inputs: Sequence[Any], constant: None) -> list[Any]:
    """``inputs[0]`` with the elements of ``inputs[1]``; a new tensor if this worker has none."""
    into, source = inputs
    if isinstance(into, torch.Tensor) and isinstance(source, torch.Tensor):
        return [into.copy_(source).detach()]
    return [_laid_out(source, call.outputs[0]) if isinstance(source, torch.Tensor) else source]


def _laid_out(source: torch.Tensor, meta: TensorMetadata) -> torch.Tensor:
    """A tensor with these strides in memory of its own."""
    memory = torch.zeros(meta.extent, dtype=meta.dtype, device=source.device)
    made = memory.as_strided(meta.shape, meta.stride, meta.offset)
    if 0 in meta.stride:  # an expanded dim has one element for many
        first = tuple(slice(0, 1) if step == 0 else slice(None) for step in meta.stride)
        made, whole = made[first], made
        made.copy_(source[first])
        return whole
    return made.copy_(source)


def part(worker: Interpreter, call: FunctionCall, inputs: Sequence[Any], constant: None) -> list[Any]:
    """The same tensor, for a mesh that is a part of its mesh."""
    return [inputs[0].detach()]


def spread(worker: Interpreter, call: FunctionCall, inputs: Sequence[Any], constant: None) -> list[Any]:
    """A copy on the workers that have the value, zeros on the others."""
    (meta,) = call.outputs
    if inputs[0] is None:
        return [torch.zeros(meta.shape, dtype=meta.dtype, device=local(meta.device))]
    return [inputs[0].clone(memory_format=torch.contiguous_format)]


def _reduce(group: Group, plan: Reduction, value: Any, into: Any) -> Any:
    to = None if plan.to is None else [rank for rank, number in enumerate(group.members) if number in plan.to]
    target = into if isinstance(into, torch.Tensor) else None
    if plan.kind != STACK and not plan.scatter:
        return collectives.all_reduce(group, value, plan.expected, plan.kind, to=to, into=target)
    if plan.kind == STACK and plan.scatter:
        result = collectives.all_to_all(group, value, plan.expected)
    elif plan.scatter:
        result = collectives.reduce_scatter(group, value, plan.expected, plan.kind)
    else:
        result = collectives.all_gather(group, value, plan.expected, to=to)
    return target.copy_(result) if target is not None and isinstance(result, torch.Tensor) else result


def _group(worker: Interpreter, plan: Reduction) -> Group:
    """The group of this worker in a reduction."""
    groups = _groups(worker, plan.expected)
    return next(groups.get(members) for members in plan.groups if groups.number in members)


def _meet(worker: Interpreter, plan: Move) -> list[Group]:
    """The groups of this worker; all workers make groups in one order, before anything is sent."""
    groups = _groups(worker, plan.expected)
    return [groups.get(members) for members in plan.groups if groups.number in members]


def _groups(worker: Interpreter, expected: TensorMetadata) -> Groups:
    key = f"groups of {expected.device.type}"
    groups: Groups | None = worker.own.get(key)
    if groups is None:
        groups = worker.own[key] = Groups(
            worker.number,
            stream=f"{worker.stream}/{expected.device.type}",
            device=local(expected.device),
        )
    return groups
