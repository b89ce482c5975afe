"""Turns a recorded trace into a `Traced`: its inputs, its outputs, what it leaves behind, and the workers' programs."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from skipper.tensor_engine.errors import CompileError
from skipper.tensor_engine.script.bundles import bundled
from skipper.tensor_engine.script.call_site import GIVEN, CallSite
from skipper.tensor_engine.script.guards import TraceSurroundings
from skipper.tensor_engine.script.instruction_stream import InstructionStream
from skipper.tensor_engine.script.recording import Noted, TraceRecorder
from skipper.tensor_engine.script.tensor import Tensor, wrap
from skipper.tensor_engine.script.traced import (
    ARGUMENT,
    AS_IT_IS,
    MADE,
    MAPPING,
    NAMED,
    SEQUENCE,
    Gradients,
    Made,
    ReplayPart,
    ReplayResult,
    Traced,
    put_together,
    seal,
)
from skipper.tensor_engine.script.value import TensorStorage, Value
from skipper.tensor_engine.shared.encoding import Form
from skipper.tensor_engine.shared.program import GET_BACK, GIVE_BACK, LEND, TAKE, CompiledProgram, ProgramStep
from skipper.tensor_engine.worker.calls import FunctionCall

Before = dict[int, tuple[Tensor, torch.Tensor | None]]
"""Tensors that may get a gradient, and their gradient before the call, by the identity of the tensor."""

_AWAITED = {TAKE: LEND, GET_BACK: GIVE_BACK}
"""The parts of a borrow that wait for another stream, and the part of the same borrow that each waits for."""

_PARTS_OF_BORROWS = frozenset({*_AWAITED, *_AWAITED.values()})


def compile_trace(
    name: str,
    recorder: TraceRecorder,
    tensors: Sequence[Tensor],
    result: list[Any],
    before: Before,
    surroundings: TraceSurroundings,
    backend: str | None = None,
) -> tuple[Traced, Any]:
    """Make the replay of a recorded call.

    A tensor that is still alive although nothing here holds it was left behind by the call. So no step may keep tensors
    of another one: ``result``, which holds the results, and ``before``, the gradients before the call, are emptied on
    the way. ``tensors`` are the inputs; ``backend`` is one of `torch.compile`, for the workers.

    Returns:
        The replay, and the result of the call.

    Raises:
        CompileError: the call cannot be replayed.
    """
    _require_unchanged(recorder)
    given = tuple(tensor.remote_value.ref for tensor in tensors)
    gradients, new_on_arguments = _read_gradients(recorder, tensors, before)
    reading = _ResultReading(recorder, tensors, given)
    template = reading.read(result.pop())
    reading.take_gradients(new_on_arguments, gradients)
    read = ReplayResult(template, reading.made)
    kept, results = _find_kept(recorder, reading.take_values())
    _require_alive(recorder)
    grads = {leaf.grad.remote_value.ref for leaf in recorder.leaves.values() if isinstance(leaf.grad, Tensor)}
    changed, changed_arguments = _find_changed(recorder, tensors, given)
    parts, passing = _cut(name, recorder, given, read, {value.ref for value in kept}, backend)
    traced = Traced(
        parts=parts,
        given=given,
        passing=passing,
        captured=[value for ref, known in recorder.read.items() if (value := known()) and ref not in given],
        changed=changed,
        changed_arguments=changed_arguments,
        kept=kept,
        leaves_more=any(value.ref not in grads for value in kept),
        gradients=gradients,
        result=read,
        surroundings=surroundings,
        borrows=any(part.borrows for part in parts),
    )
    return traced, _first_result(traced, results, tensors)


def _require_unchanged(recorder: TraceRecorder) -> None:
    if recorder.foreign:
        raise CompileError(
            "the function uses a tensor that is the result of operations outside which autograd has recorded, and "
            "gradients do not flow out of it: compile these operations too, or use x.detach()"
        )
    for known, value in recorder.met.values():
        tensor = known()
        if isinstance(tensor, Tensor) and tensor.remote_value is not value():
            raise CompileError("the function changes the shape of a tensor in place that it has not made itself")


def _require_alive(recorder: TraceRecorder) -> None:
    if any(known() is None for known in recorder.read.values()):
        raise CompileError(
            "the function replaces a tensor from outside that it has read, as `self.state = self.state + x` does: "
            "replays would keep reading the old one. Write into it (copy_, add_), or pass it in and return it"
        )


def _read_gradients(
    recorder: TraceRecorder, tensors: Sequence[Tensor], before: Before
) -> tuple[Gradients, list[tuple[int, Tensor]]]:
    """The required gradients before a replay, and the gradients after it.

    Returns:
        These, without those of the arguments; and the arguments with a new gradient, with their numbers.
    """
    inputs = {id(tensor) for tensor in tensors}
    outside = [
        (tensor, tensor.requires_grad)
        for known, _ in recorder.met.values()
        if (tensor := known()) is not None and id(tensor) not in inputs and tensor.is_leaf
    ]
    expected: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    left: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    for leaf in recorder.leaves.values():
        if id(leaf) in inputs or id(leaf) not in before:
            continue
        old, new = before[id(leaf)][1], leaf.grad
        if old is None or (isinstance(old, Tensor) and old.remote_value.ref in recorder.read):
            expected.append((leaf, old))
        if new is not old:
            left.append((leaf, new))
    new_on_arguments = [
        (index, tensor)
        for index, tensor in enumerate(tensors)
        if id(tensor) in before and tensor.grad is not before[id(tensor)][1]
    ]
    before.clear()
    return Gradients(outside, expected, left, []), new_on_arguments


class _ResultReading:
    """Takes the result of a call apart.

    Attributes:
        made: the tensors in it that each replay makes again, including gradients of arguments.
    """

    def __init__(self, recorder: TraceRecorder, tensors: Sequence[Tensor], given: Sequence[int]) -> None:
        self.made: list[Made] = []
        self._recorder = recorder
        self._found: list[Tensor] = []
        self._numbers: dict[int, int] = {}
        self._storages: dict[int, int | TensorStorage] = {
            id(value.storage): value.storage for each in recorder.read.values() if (value := each()) is not None
        }
        for index, tensor in reversed(list(enumerate(tensors))):
            self._storages[id(tensor.remote_value.storage)] = index
        self._arguments = {id(tensor): index for index, tensor in enumerate(tensors)}
        self._given = {ref: index for index, ref in enumerate(given)}

    def take_gradients(self, new_on_arguments: list[tuple[int, Tensor]], gradients: Gradients) -> None:
        """Take the new gradients from the arguments, as results: then only gradients held elsewhere stay alive."""
        for index, tensor in new_on_arguments:
            grad = tensor.grad
            gradients.left_on_arguments.append((index, self._note(grad) if isinstance(grad, Tensor) else None))
        for _, tensor in new_on_arguments:
            tensor.grad = None

    def take_values(self) -> list[Value]:
        """The values of the tensors that are made again; this object then holds none of the tensors."""
        values = [tensor.remote_value for tensor in self._found]
        self._found.clear()
        return values

    def read(self, item: Any) -> tuple[int, Any]:
        """How an item of the result is assembled, for `put_together`.

        Raises:
            CompileError: it contains a tensor of the script.
        """
        if isinstance(item, Tensor):
            if id(item) in self._arguments:
                return ARGUMENT, self._arguments[id(item)]
            if item.remote_value.ref in self._recorder.made or item.remote_value.ref in self._given:
                return MADE, self._note(item)
            return AS_IT_IS, item
        if isinstance(item, torch.Tensor):
            raise CompileError("a compiled function returns a tensor of the script, which replays cannot make")
        if isinstance(item, list | tuple):
            kind = NAMED if hasattr(item, "_fields") else SEQUENCE
            return kind, (type(item), [self.read(each) for each in item])
        if isinstance(item, dict):
            return MAPPING, (type(item), {name: self.read(each) for name, each in item.items()})
        return AS_IT_IS, item

    def _note(self, tensor: Tensor) -> int:
        number = self._numbers.get(id(tensor))
        if number is None:
            value = tensor.remote_value
            storage = self._storages.setdefault(id(value.storage), -len(self._storages) - 1)
            number = self._numbers[id(tensor)] = len(self.made)
            self.made.append(Made(value, self._given.get(value.ref), tensor.requires_grad, storage))
            self._found.append(tensor)
        return number


def _find_kept(recorder: TraceRecorder, results: list[Value]) -> tuple[list[Value], dict[int, Value]]:
    """The values that the call has left behind somewhere.

    Args:
        recorder: the recorder of the call.
        results: the values of the results; only this list may hold them; it is emptied.

    Returns:
        These values, and the values of the results by number, left behind or not.
    """
    fields = [
        (value.ref, value.meta, value.instruction_stream, value.mesh, value.storage, _let_go(value))
        for value in {value.ref: value for value in results}.values()  # several tensors may have the same value
        if value.ref in recorder.made
    ]
    results.clear()
    gc.collect(0)  # all objects of the call are young: it ran with the collector off
    alive = [value for known in recorder.made.values() if (value := known()) is not None]
    kept = {value.ref: value for value in alive if value.barred is None and value.storage.barred is None}
    made: dict[int, Value] = {}
    for ref, meta, instruction_stream, mesh, storage, freed in fields:
        if ref in kept:
            kept[ref].freed = freed
        made[ref] = kept.get(ref) or Value(ref, meta, instruction_stream, mesh, storage)
    return list(kept.values()), made


def _let_go(value: Value) -> deque[int]:
    """Keep the workers from freeing a value when this object ends; returns the queue for its number."""
    freed, value.freed = value.freed, deque()
    return freed


def _find_changed(
    recorder: TraceRecorder, tensors: Sequence[Tensor], given: Sequence[int]
) -> tuple[list[Tensor], list[int]]:
    """What is changed in place, including views of it: it must not be lent, and autograd must learn of the change.

    Returns:
        The captured tensors, and the numbers of the arguments.
    """
    changed = {
        id(storage)
        for each in recorder.instructions
        for place in each.site.form.writes
        if (storage := recorder.storages.get(each.inputs[place])) is not None
    }
    arguments = [index for index, tensor in enumerate(tensors) if id(tensor.remote_value.storage) in changed]
    outside = [
        tensor
        for known, _ in recorder.met.values()
        if isinstance(tensor := known(), Tensor)
        and id(tensor.remote_value.storage) in changed
        and tensor.remote_value.ref not in given
    ]
    return outside, arguments


def _first_result(traced: Traced, results: dict[int, Value], tensors: Sequence[Tensor]) -> Any:
    """The result of the traced call; the arguments get their gradients back."""
    made = []
    for each in traced.result.made:
        value = results[each.slot] if each.argument is None else tensors[each.argument].remote_value
        made.append(seal(value) if each.sealed else wrap(value))
    traced.gradients.leave(tensors, made)
    return put_together(traced.result.template, made, tensors)


def _cut(
    name: str, recorder: TraceRecorder, given: Sequence[int], result: ReplayResult, kept: set[int], backend: str | None
) -> tuple[list[ReplayPart], list[tuple[int, InstructionStream]]]:
    """Make the programs.

    Returns:
        The parts for the workers; and the values that pass from one program to a later one, with their owners.
    """
    segments = _segments_of(bundled(recorder.instructions, recorder.storages))
    results = {each.slot for each in result.made if each.argument is None and each.barred is None}
    maker: dict[int, int] = {}
    passing: dict[int, InstructionStream] = {}
    for number, segment in enumerate(segments):
        for each in segment.instructions:
            for ref in each.inputs:
                if ref not in kept and ref not in results and maker.get(ref, number) != number:
                    passing[ref] = segments[maker[ref]].instruction_stream
            maker.update(dict.fromkeys(each.outputs, number))
    wanted = results | passing.keys()
    fresh = set(given) | (wanted - kept)
    borrows: dict[int, int] = {}
    for each in recorder.instructions:
        if _part_of_borrow(each) == LEND:
            borrows[each.constants[0]] = len(borrows)
    parts: list[ReplayPart] = []
    for segment in segments:
        program = segment.program(name, fresh, wanted, kept, borrows, backend)
        maker_of_program = "skipper.tensor_engine.worker.replay:program_site"
        form = Form(maker_of_program, name, len(program.outputs), len(program.inputs), int(program.borrows))
        site = CallSite(form, program.packed(), (), (GIVEN, None))
        stacks = [each.stack for each in segment.instructions]
        is_awaited = any(_part_of_borrow(each) in _AWAITED.values() for each in segment.instructions)
        part = ReplayPart(
            segment.instruction_stream, site, program.inputs, program.outputs, stacks, program.borrows, is_awaited
        )
        parts.append(part)
    return parts, list(passing.items())


class _Segment:
    """Instructions of a trace that go to one instruction stream in one message.

    Attributes:
        instruction_stream: the stream of the instructions.
        instructions: in their order.
    """

    def __init__(self, instruction_stream: InstructionStream) -> None:
        self.instruction_stream = instruction_stream
        self.instructions: list[Noted] = []

    def program(
        self,
        name: str,
        given: set[int],
        wanted: set[int],
        kept: set[int],
        borrows: Mapping[int, int],
        backend: str | None = None,
    ) -> CompiledProgram:
        """The program for the workers of the instruction stream.

        Each replay brings new ``given`` values, ``wanted`` ones are needed elsewhere in a replay or after it, and
        ``kept`` ones keep their number from the trace. ``borrows`` numbers the borrows of the trace.
        """
        sites: dict[int, int] = {}
        descriptions: list[tuple[Form, Any]] = []
        steps: list[ProgramStep] = []
        made: dict[int, None] = {}
        inputs: dict[int, None] = {}
        captured: dict[int, None] = {}
        has_borrows = False
        for each in self.instructions:
            number = sites.get(each.site.number)
            if number is None:
                number = sites[each.site.number] = len(descriptions)
                descriptions.append((each.site.form, each.site.description))
            for ref in each.inputs:
                if ref not in made:
                    (inputs if ref in given else captured)[ref] = None
            made.update(dict.fromkeys(each.outputs))
            constants = each.constants
            if _part_of_borrow(each) is not None:
                constants, has_borrows = (borrows[constants[0]],), True
            steps.append(ProgramStep(number, each.outputs, each.inputs, constants))
        return CompiledProgram(
            name,
            tuple(descriptions),
            tuple(steps),
            tuple(inputs),
            tuple(captured),
            tuple(ref for ref in made if ref in wanted),
            tuple(ref for ref in made if ref in kept),
            has_borrows,
            backend,
        )


def _part_of_borrow(each: Noted) -> str | None:
    """Which part of a borrow an instruction is, or None."""
    call = each.site.description
    return call.function if isinstance(call, FunctionCall) and call.function in _PARTS_OF_BORROWS else None


def _segments_of(instructions: Sequence[Noted]) -> list[_Segment]:
    """Cut a trace into few segments, which keep the order of the instructions of each stream on every worker.

    An instruction that waits for another stream is in a later segment than what it waits for. So each segment waits
    only for earlier ones, and once these are sent, nothing can block it.
    """
    segments: list[_Segment] = []
    places: dict[tuple[str, int], int] = {}
    for each in instructions:
        part = _part_of_borrow(each)
        first = places[_AWAITED[part], each.constants[0]] + 1 if part in _AWAITED else 0
        place = _place(segments, each.instruction_stream, first)
        if place is None:
            place = len(segments)
            segments.append(_Segment(each.instruction_stream))
        segments[place].instructions.append(each)
        if part is not None:
            places[part, each.constants[0]] = place
    return segments


def _place(segments: Sequence[_Segment], instruction_stream: InstructionStream, first: int) -> int | None:
    """The segment, from ``first`` on, that may take the next instruction.

    No later segment may be of the same stream on the same workers. Other streams run concurrently.
    """
    for place in range(len(segments) - 1, first - 1, -1):
        other = segments[place].instruction_stream
        if other is instruction_stream:
            return place
        if (
            other.session is instruction_stream.session
            and other.stream == instruction_stream.stream
            and other.members & instruction_stream.members
        ):
            return None
    return None
