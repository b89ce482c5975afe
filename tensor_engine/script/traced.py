"""`Traced`: one recorded call of a compiled function, the script's part: what goes in, what comes out, what stays."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from skipper.tensor_engine.errors import CompileError
from skipper.tensor_engine.script.guards import Surroundings
from skipper.tensor_engine.script.instruction_stream import InstructionStream
from skipper.tensor_engine.script.issue import new_ref
from skipper.tensor_engine.script.propagation import GIVEN, CallSite
from skipper.tensor_engine.script.recording import Recorder
from skipper.tensor_engine.script.results import (
    ARGUMENT,
    AS_IT_IS,
    MADE,
    MAPPING,
    NAMED,
    SEQUENCE,
    Made,
    put_together,
    seal,
)
from skipper.tensor_engine.script.segments import segments_of
from skipper.tensor_engine.script.tensor import Storage, Tensor, Value, wrap
from skipper.tensor_engine.shared.encoding import Form
from skipper.tensor_engine.shared.stacks import Replayed, Stack, capture


class _Part:
    """What one instruction stream gets in a replay."""

    __slots__ = ("inputs", "instruction_stream", "outputs", "site", "stacks")

    def __init__(
        self,
        instruction_stream: InstructionStream,
        site: CallSite,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        stacks: list[Stack],
    ) -> None:
        self.instruction_stream = instruction_stream
        self.site = site
        self.inputs = inputs
        self.outputs = outputs
        self.stacks = stacks


class Traced:
    """A recorded call, to be replayed.

    Args:
        name: of the function.
        recorder: what it has noted.
        tensors: the tensors that went in.
        result: what came out, alone in a list, from which it is taken.
        before: tensors that may get a gradient, and the one that they had before the call; it is cleared.
        surroundings: what else replays depend on.
        backend: of `torch.compile`, for the workers; None for none.

    Attributes:
        leaves_more: whether the call has left tensors behind that are neither results nor gradients.

    Raises:
        CompileError: it cannot be replayed.
    """

    def __init__(
        self,
        name: str,
        recorder: Recorder,
        tensors: Sequence[Tensor],
        result: list[Any],
        before: dict[int, tuple[Tensor, torch.Tensor | None]],
        surroundings: Surroundings,
        backend: str | None = None,
    ) -> None:
        self._backend = backend
        self._parts: list[_Part] = []
        self._surroundings = surroundings
        self._given = tuple(tensor._value.ref for tensor in tensors)
        _require_unchanged(recorder)
        self._note_gradients(recorder, tensors, before)
        kept = self._note_kept(recorder, self._note_results(recorder, tensors, result.pop()))
        _require_alive(recorder)
        gradients = {leaf.grad._value.ref for leaf in recorder.leaves.values() if isinstance(leaf.grad, Tensor)}
        self.leaves_more = any(value.ref not in gradients for value in kept)
        self._kept = kept
        self._captured = [
            value for ref, known in recorder.read.items() if (value := known()) and ref not in self._given
        ]
        self._note_writes(recorder, tensors)
        self._cut(name, recorder, {value.ref for value in kept})
        self._result = self._finish(tensors)

    def __del__(self) -> None:
        # Only a note, as of values: the instruction streams tell their workers with what they send next.
        for part in self._parts:
            part.instruction_stream.unused.append(part.site.number)

    @property
    def instruction_streams(self) -> set[InstructionStream]:
        """Whose workers replay it."""
        return {part.instruction_stream for part in self._parts}

    def take_result(self) -> Any:
        """The result of the traced call; once."""
        result, self._result = self._result, None
        return result

    def holds(self) -> bool:
        """Whether what the program takes for granted still holds, arguments apart."""
        for leaf, grad in self._expected:
            if leaf.grad is not grad:
                return False
        for tensor, requires_grad in self._outside:
            if tensor.requires_grad is not requires_grad:
                return False
        return self._surroundings.hold()

    def replay(self, tensors: Sequence[Tensor]) -> Any:
        """Do it again with other tensors.

        Raises:
            DroppedTensorError: a tensor that the function finds outside has been dropped.
            BorrowedTensorError: such a tensor is lent, or one that is changed is lent to be read only.
            EngineClosedError: the engine has been shut down, or a worker is gone.
        """
        changed = [*self._changed, *(tensors[index] for index in self._changed_arguments)]
        for tensor in changed:
            tensor._value.storage.refuse_change()
        for value in self._captured:
            if value.barred is not None or value.storage.barred is not None:
                value.check()
        stack = capture(2)
        slots = {slot: tensor._value.ref for slot, tensor in zip(self._given, tensors, strict=True)}
        for part in self._parts:
            stack_here = Replayed(stack)
            stack_here.traced = part.stacks
            outputs = [new_ref() for _ in part.outputs]
            inputs = [slots[slot] for slot in part.inputs]
            part.instruction_stream.put(part.site, outputs, inputs, replayed=stack_here, weight=len(part.stacks))
            slots.update(zip(part.outputs, outputs, strict=True))
        for slot, instruction_stream in self._passing:
            instruction_stream.freed.append(slots[slot])
        storages: dict[int, Storage] = {}
        made = [self._make(each, slots, tensors, storages) for each in self._made]
        if changed:
            torch.autograd.graph.increment_version(changed)
        for leaf, grad in self._left:
            if leaf.grad is not grad:
                leaf.grad = grad
        for index, place in self._left_on_arguments:
            tensors[index].grad = None if place is None else made[place]
        return put_together(self._template, made, tensors)

    def _make(
        self, each: Made, slots: Mapping[int, int], tensors: Sequence[Tensor], storages: dict[int, Storage]
    ) -> Tensor:
        if each.argument is not None:
            value = tensors[each.argument]._value
        else:
            storage = each.storage
            if isinstance(storage, int):
                if storage >= 0:
                    storage = tensors[storage]._value.storage
                else:
                    storage = storages.get(storage) or storages.setdefault(storage, Storage())
            value = Value(slots[each.slot], each.meta, each.instruction_stream, each.mesh, storage)
        return seal(value) if each.sealed else wrap(value)

    def _note_gradients(
        self, recorder: Recorder, tensors: Sequence[Tensor], before: dict[int, tuple[Tensor, torch.Tensor | None]]
    ) -> None:
        """What gradients there have to be before a replay, and what there are after it."""
        inputs = {id(tensor) for tensor in tensors}
        self._outside = [
            (tensor, tensor.requires_grad)
            for known, _ in recorder.met.values()
            if (tensor := known()) is not None and id(tensor) not in inputs and tensor.is_leaf
        ]
        self._expected: list[tuple[Tensor, torch.Tensor | None]] = []
        self._left: list[tuple[Tensor, torch.Tensor | None]] = []
        for leaf in recorder.leaves.values():
            if id(leaf) in inputs or id(leaf) not in before:
                continue
            old, new = before[id(leaf)][1], leaf.grad
            if old is None or (isinstance(old, Tensor) and old._value.ref in recorder.read):
                self._expected.append((leaf, old))
            if new is not old:
                self._left.append((leaf, new))
        self._grads_of_arguments = [
            (index, tensor, before[id(tensor)][1])
            for index, tensor in enumerate(tensors)
            if id(tensor) in before and tensor.grad is not before[id(tensor)][1]
        ]
        before.clear()

    def _note_results(self, recorder: Recorder, tensors: Sequence[Tensor], result: Any) -> list[Value]:
        """How the result is put together; and the values that a replay makes for it."""
        self._made: list[Made] = []
        known: dict[int, int] = {}
        found: list[Tensor] = []
        storages: dict[int, int | Storage] = {
            id(value.storage): value.storage for each in recorder.read.values() if (value := each()) is not None
        }
        storages.update({id(tensor._value.storage): index for index, tensor in reversed(list(enumerate(tensors)))})
        places = {id(tensor): index for index, tensor in enumerate(tensors)}
        refs = {ref: index for index, ref in enumerate(self._given)}

        def note(tensor: Tensor) -> int:
            if id(tensor) not in known:
                value = tensor._value
                storage = storages.setdefault(id(value.storage), -len(storages) - 1)
                known[id(tensor)] = len(self._made)
                self._made.append(Made(value, refs.get(value.ref), tensor.requires_grad, storage))
                found.append(tensor)
            return known[id(tensor)]

        def read(item: Any) -> tuple[int, Any]:
            if isinstance(item, Tensor):
                if id(item) in places:
                    return ARGUMENT, places[id(item)]
                if item._value.ref in recorder.made or item._value.ref in refs:
                    return MADE, note(item)
                return AS_IT_IS, item
            if isinstance(item, torch.Tensor):
                raise CompileError("a compiled function returns a tensor of the script, which replays cannot make")
            if isinstance(item, list | tuple):
                kind = NAMED if hasattr(item, "_fields") else SEQUENCE
                return kind, (type(item), [read(each) for each in item])
            if isinstance(item, dict):
                return MAPPING, (type(item), {name: read(each) for name, each in item.items()})
            return AS_IT_IS, item

        self._template = read(result)
        self._left_on_arguments: list[tuple[int, int | None]] = []
        for index, tensor, _ in self._grads_of_arguments:
            grad = tensor.grad
            self._left_on_arguments.append((index, note(grad) if isinstance(grad, Tensor) else None))
        values = [tensor._value for tensor in found]
        for _, tensor, _ in self._grads_of_arguments:
            tensor.grad = None  # for the time in which it is seen who else holds it
        del self._grads_of_arguments
        return values

    def _note_kept(self, recorder: Recorder, results: list[Value]) -> list[Value]:
        """The values that the call has left behind somewhere, whether they are results or not."""
        fields = [
            (value.ref, value.meta, value.instruction_stream, value.mesh, value.storage, _let_go(value))
            for value in {value.ref: value for value in results}.values()  # several tensors may stand for one
            if value.ref in recorder.made
        ]
        results.clear()
        gc.collect(0)  # all that the call has made is young: it ran with the collector off
        alive = [value for known in recorder.made.values() if (value := known()) is not None]
        kept = {value.ref: value for value in alive if value.barred is None}
        self._results: dict[int, Value] = {}
        for ref, meta, instruction_stream, mesh, storage, freed in fields:
            if ref in kept:
                kept[ref]._freed = freed
            self._results[ref] = kept.get(ref) or Value(ref, meta, instruction_stream, mesh, storage)
        return list(kept.values())

    def _note_writes(self, recorder: Recorder, tensors: Sequence[Tensor]) -> None:
        """What is changed in place, views of it included: it must not be lent, and autograd has to learn of it."""
        changed = {
            id(storage)
            for each in recorder.instructions
            for place in each.site.form.writes
            if (storage := recorder.storages.get(each.inputs[place])) is not None
        }
        self._changed_arguments = [
            index for index, tensor in enumerate(tensors) if id(tensor._value.storage) in changed
        ]
        self._changed = [
            tensor
            for known, _ in recorder.met.values()
            if (tensor := known()) is not None
            and id(tensor._value.storage) in changed
            and tensor._value.ref not in self._given
        ]

    def _cut(self, name: str, recorder: Recorder, kept: set[int]) -> None:
        """Make the programs."""
        segments = segments_of(recorder.instructions)
        results = {each.slot for each in self._made if each.argument is None}
        maker: dict[int, int] = {}
        passing: dict[int, InstructionStream] = {}
        for number, segment in enumerate(segments):
            for each in segment.instructions:
                for ref in each.inputs:
                    if ref not in kept and ref not in results and maker.get(ref, number) != number:
                        passing[ref] = segments[maker[ref]].instruction_stream
                maker.update(dict.fromkeys(each.outputs, number))
        self._passing = list(passing.items())
        wanted = results | passing.keys()
        given = set(self._given) | (wanted - kept)
        for segment in segments:
            program = segment.program(name, given, wanted, kept, self._backend)
            form = Form(
                "skipper.tensor_engine.worker.replay:program_site", name, len(program.outputs), len(program.inputs)
            )
            site = CallSite(form, program.packed(), (), (GIVEN, None))
            stacks = [each.stack for each in segment.instructions]
            self._parts.append(_Part(segment.instruction_stream, site, program.inputs, program.outputs, stacks))

    def _finish(self, tensors: Sequence[Tensor]) -> Any:
        """The result of the traced call, and the gradients of its arguments."""
        made = []
        for each in self._made:
            value = self._results[each.slot] if each.argument is None else tensors[each.argument]._value
            made.append(seal(value) if each.sealed else wrap(value))
        self._results.clear()
        for index, place in self._left_on_arguments:
            tensors[index].grad = None if place is None else made[place]
        return put_together(self._template, made, tensors)


def _let_go(value: Value) -> deque[int]:
    """Have the end of a value not be its end on the workers, while it is seen who else holds it."""
    freed, value._freed = value._freed, deque()
    return freed


def _require_unchanged(recorder: Recorder) -> None:
    if recorder.foreign:
        raise CompileError(
            "the function uses a tensor that is the result of operations outside which autograd has recorded, and "
            "gradients do not flow out of it: compile these operations too, or use x.detach()"
        )
    for known, value in recorder.met.values():
        tensor = known()
        if tensor is not None and tensor._value is not value():
            raise CompileError("the function changes the shape of a tensor in place that it has not made itself")


def _require_alive(recorder: Recorder) -> None:
    if any(known() is None for known in recorder.read.values()):
        raise CompileError(
            "the function replaces a tensor from outside that it has read, as `self.state = self.state + x` does: "
            "replays would go on reading the old one. Write into it (copy_, add_), or pass it in and return it"
        )
