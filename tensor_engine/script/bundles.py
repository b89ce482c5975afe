"""Bundles of reductions: one instruction for several values, which the workers exchange in few large messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from skipper.tensor_engine.script.call_site import CallSite
from skipper.tensor_engine.script.recording import Noted
from skipper.tensor_engine.script.value import TensorStorage
from skipper.tensor_engine.shared.metadata import TensorMetadata
from skipper.tensor_engine.shared.reductions import STACK
from skipper.tensor_engine.worker.calls import FunctionCall
from skipper.tensor_engine.worker.communication import Reduction

T = TypeVar("T")

REDUCE = "skipper.tensor_engine.worker.communication:reduce"
TOGETHER = "skipper.tensor_engine.worker.communication:reduce_together"


@dataclass(frozen=True, slots=True)
class PendingReduction:
    """One reduction, before it is known which others it is bundled with.

    Attributes:
        where: what the reductions of a bundle have in common, besides `plan`.
        plan: its description for the workers.
        is_new: whether the result is a new tensor.
        read: the memory of the value.
        written: the memory of the result; None if it is new, so that nothing can have read it yet.
    """

    where: object
    plan: Reduction
    is_new: bool
    read: TensorStorage
    written: TensorStorage | None

    def kind(self) -> tuple[object, ...]:
        """What the reductions of a bundle have in common."""
        return self.where, self.is_new, self.plan.groups, self.plan.kind, self.plan.expected.device


def _is_simple(plan: Reduction) -> bool:
    """Whether all members get a result with the shape of their values."""
    return plan.kind != STACK and not plan.scatter and plan.to is None


@dataclass(slots=True)
class _Run:
    first: PendingReduction | None = None
    written: set[int] = field(default_factory=set)

    def takes(self, each: PendingReduction) -> bool:
        """Whether a reduction can join the bundle: all values are read before any result is written."""
        if self.first is None or not _is_simple(each.plan):
            return False
        return each.kind() == self.first.kind() and self.written.isdisjoint((id(each.read), id(each.written)))

    def add(self, each: PendingReduction) -> None:
        self.first = self.first or each
        if each.written is not None:
            self.written.add(id(each.written))


def runs(items: Iterable[tuple[T, PendingReduction | None]]) -> list[list[T]]:
    """Neighbours that can be bundled, in their order; other items stay alone."""
    found: list[list[T]] = []
    run = _Run()
    for item, pending in items:
        if pending is not None and run.takes(pending):
            found[-1].append(item)
        else:
            found.append([item])
            run = _Run()
        if pending is not None and _is_simple(pending.plan):
            run.add(pending)
    return found


def call_together(plans: Sequence[Reduction], name: str, outputs: Sequence[TensorMetadata]) -> FunctionCall:
    """The call that reduces values together, into new tensors with this metadata, or into as many further inputs."""
    count = len(plans)
    writes = () if outputs else tuple(range(count, 2 * count))
    inputs = count + len(writes)
    return FunctionCall(TOGETHER, name, inputs, tuple(outputs), tuple(plans), sees_poison=True, writes=writes)


def bundled(instructions: Sequence[Noted], storages: Mapping[int, TensorStorage]) -> list[Noted]:
    """The instructions of a trace, with consecutive independent reductions bundled into one.

    Args:
        instructions: in their order.
        storages: of the values, by number.
    """
    pending = ((each, _pending(each, storages)) for each in instructions)
    return [run[0] if len(run) == 1 else _together(run) for run in runs(pending)]


def _pending(each: Noted, storages: Mapping[int, TensorStorage]) -> PendingReduction | None:
    call: Any = each.site.description
    if not isinstance(call, FunctionCall) or call.function != REDUCE:
        return None
    result = (*each.outputs, each.inputs[-1])[0]
    return PendingReduction(
        each.instruction_stream, call.static, bool(call.outputs), storages[each.inputs[0]], storages[result]
    )


def _together(run: Sequence[Noted]) -> Noted:
    calls: list[FunctionCall] = [each.site.description for each in run]
    outputs = [meta for call in calls for meta in call.outputs]
    call = call_together([each.static for each in calls], calls[0].name, outputs)
    return Noted(
        run[0].instruction_stream,
        CallSite.of_call(call),
        tuple(ref for each in run for ref in each.outputs),
        (*(each.inputs[0] for each in run), *(each.inputs[-1] for each in run if call.writes)),
        (),
        run[0].stack,
    )
