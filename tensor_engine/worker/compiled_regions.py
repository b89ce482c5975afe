"""Regions of a program that `torch.compile` turns into one function each, on a worker.

A region is a run of operations that change only memory that they have made themselves, and draw no random numbers. So
running it twice has no effect: its compiled function is first tried next to the plain steps, and if it fails later, the
plain steps show which operation fails. Everything else runs as in other programs: collectives, calls, changes of
tensors from outside, random numbers.
"""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch

from skipper.tensor_engine.shared.metadata import TensorMetadata, metadata_of
from skipper.tensor_engine.shared.program import OPERATION, CompiledProgram, ProgramStep
from skipper.tensor_engine.worker.device import local
from skipper.tensor_engine.worker.interpreter import Interpreter
from skipper.tensor_engine.worker.operations import CONSTANT, INPUT, LIST, TUPLE, Description, Node, find

_log = logging.getLogger("skipper.tensor_engine")

_SHORTEST = 2
"""From this many operations on compiling pays."""


class CompiledRegion:
    """Some consecutive steps of a program.

    Attributes:
        begin: its first step.
        end: the step after its last one.
        inputs: slots that it uses but does not make.
        outputs: slots that it makes and that are needed after it.
        is_compiled: whether `run` can be called.
    """

    def __init__(self, program: CompiledProgram, begin: int, end: int) -> None:
        self.begin = begin
        self.end = end
        self._program = program
        steps = program.steps[begin:end]
        made = dict.fromkeys(slot for step in steps for slot in step.outputs)
        used = dict.fromkeys(slot for step in steps for slot in step.inputs)
        needed = {slot for step in program.steps[end:] for slot in step.inputs} | {*program.outputs, *program.kept}
        self.inputs = tuple(slot for slot in used if slot not in made)
        self.outputs = tuple(slot for slot in made if slot in needed)
        self.is_compiled = False
        self._is_tried = False
        self._function: Callable[..., Sequence[torch.Tensor]] | None = None
        self._again: tuple[TensorMetadata | None, ...] = ()

    def attempt(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Compile it, and check that its results, their layout and shared memory are the same as those of the steps.

        If not, or if the compiler gives up, the plain steps run from now on, and a warning is logged.

        Args:
            inputs: the values in the slots of the inputs.
            outputs: the values that the steps have put into the slots of the outputs.
        """
        if self._is_tried or not all(isinstance(each, torch.Tensor) for each in (*inputs, *outputs)):
            return
        self._is_tried = True
        backend = cast(str, self._program.backend)
        count = self.end - self.begin
        try:
            function = torch.compile(self._graph(), backend=backend, fullgraph=True, dynamic=False)
            found = function(*inputs)
        except Exception as error:  # noqa: BLE001  (compilers raise anything; the steps have run)
            why = _reason(error)
        else:
            again = _compare(inputs, outputs, found)
            if again is not None:
                self._function, self._again, self.is_compiled = function, again, True
                return
            why = "its results would share memory in another way"
        _log.warning("%d operations of the program %s stay as they are: %s", count, self._program.name, why)

    def run(self, *inputs: Any) -> Sequence[torch.Tensor]:
        """Run the compiled function.

        Raises:
            TypeError: an input is not a tensor: the steps must run one by one.
        """
        for each in inputs:
            if not isinstance(each, torch.Tensor):
                raise TypeError("there is something else in place of a tensor")
        made = cast(Callable[..., Sequence[torch.Tensor]], self._function)(*inputs)
        return [
            each if meta is None else _laid_out_again(each, meta) for each, meta in zip(made, self._again, strict=True)
        ]

    def _graph(self) -> torch.fx.GraphModule:
        graph = torch.fx.Graph()
        nodes: dict[int, Any] = {slot: graph.placeholder(f"v{slot}") for slot in self.inputs}
        for step in self._program.steps[self.begin : self.end]:
            description = _description(self._program, step)
            values = [_argument(each, step, nodes) for each in description.args]
            named = {key: _argument(each, step, nodes) for key, each in description.kwargs.items()}
            result = graph.call_function(find(description), tuple(values), named)
            for slot, (path, _) in zip(step.outputs, description.outputs, strict=True):
                nodes[slot] = functools.reduce(
                    lambda whole, place: graph.call_function(operator.getitem, (whole, place)), path, result
                )
        graph.output(tuple(nodes[slot] for slot in self.outputs))
        return torch.fx.GraphModule(torch.nn.Module(), graph)


def regions_of(program: CompiledProgram) -> list[CompiledRegion]:
    """The regions of a program, in order; none if it is not to be compiled."""
    if program.backend is None:
        return []
    found = (CompiledRegion(program, begin, end) for begin, end in _bounds(program) if end - begin >= _SHORTEST)
    return [region for region in found if region.outputs]


def refusal(worker: Interpreter, value: object, backend: str) -> str | None:
    """Why a worker cannot compile; None if it can."""
    return _refusal(backend, "cuda" if torch.cuda.is_available() else "cpu")


@functools.cache
def _refusal(backend: str, device: str) -> str | None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.add.Tensor, (x, x)),))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    try:
        with torch.no_grad():
            torch.compile(module, backend=backend, fullgraph=True, dynamic=False)(torch.ones(8, device=device))
    except Exception as error:  # noqa: BLE001  (compilers raise anything)
        return _reason(error)
    return None


def _reason(error: Exception) -> str:
    """What a compiler reports, without its advice on debugging."""
    return f"{type(error).__name__}: {str(error).partition('Set TORCH')[0].strip()}"


def _bounds(program: CompiledProgram) -> Iterator[tuple[int, int]]:
    begin = 0
    own: set[int] = set()  # slots whose whole memory this region has made
    for index, step in enumerate(program.steps):
        form, _ = program.sites[step.site]
        description = _description(program, step) if form.maker == OPERATION else None
        if (
            description is None
            or description.reshapes
            or torch.Tag.nondeterministic_seeded in find(description).tags
            or any(step.inputs[place] not in own for place in form.writes)
        ):
            yield begin, index
            begin = index + 1
            own.clear()
            continue
        is_own = all(slot in own for slot in step.inputs)
        own.update(slot for place, slot in enumerate(step.outputs) if is_own or place not in description.views)
    yield begin, len(program.steps)


@functools.lru_cache(maxsize=256)
def _unpacked(packed: bytes) -> Description:
    return Description.unpacked(packed)


def _description(program: CompiledProgram, step: ProgramStep) -> Description:
    return _unpacked(program.sites[step.site][1])


def _argument(node: Node, step: ProgramStep, nodes: dict[int, Any]) -> Any:
    kind, value = node
    if kind == INPUT:
        return nodes[step.inputs[value]]
    if kind == CONSTANT:
        return step.constants[value]
    if kind in (LIST, TUPLE):
        items = [_argument(each, step, nodes) for each in value]
        return items if kind == LIST else tuple(items)
    return local(value) if isinstance(value, torch.device) else value


def _compare(
    inputs: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], found: Sequence[torch.Tensor]
) -> tuple[TensorMetadata | None, ...] | None:
    """Compare the results of a compiled function with those of the steps.

    Returns:
        For each result None, or the layout that it must be changed to. None if that does not help.
    """
    shared = _shared(inputs, wanted)
    if shared != _shared(inputs, found):
        return None
    again: list[TensorMetadata | None] = []
    for place, (want, have) in enumerate(zip(wanted, found, strict=True)):
        if (want.shape, want.dtype, want.device) != (have.shape, have.dtype, have.device):
            return None
        if (want.stride(), want.storage_offset()) == (have.stride(), have.storage_offset()):
            again.append(None)
        elif shared.count(shared[place]) == 1 and shared[place] >= len(inputs):
            again.append(metadata_of(want))
        else:
            return None
    return tuple(again)


def _shared(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> list[int]:
    """For each output the first tensor, of inputs and outputs together, with the same memory."""
    first: dict[int, int] = {}
    storages = [each.untyped_storage()._cdata for each in (*inputs, *outputs)]
    for place, storage in enumerate(storages):
        first.setdefault(storage, place)
    return [first[storage] for storage in storages[len(inputs) :]]


def _laid_out_again(tensor: torch.Tensor, like: TensorMetadata) -> torch.Tensor:
    return torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device=tensor.device).copy_(tensor)
