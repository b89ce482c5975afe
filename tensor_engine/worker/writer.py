"""The function that a worker runs for a compiled program: generated once, with a line for each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from skipper.tensor_engine.shared.encoding import Form
from skipper.tensor_engine.shared.program import CALL, OPERATION, CompiledProgram, ProgramStep
from skipper.tensor_engine.worker.calls import FunctionCall, invoke
from skipper.tensor_engine.worker.compiled_regions import CompiledRegion
from skipper.tensor_engine.worker.device import local
from skipper.tensor_engine.worker.heap import Heap, Poison
from skipper.tensor_engine.worker.interpreter import Interpreter, Site, resolve
from skipper.tensor_engine.worker.operations import CONSTANT, FIXED, INPUT, LIST, Description, Node, find, laid_out


class WrittenPoisonError(Exception):
    """A call has left poison in what it writes."""

    def __init__(self, poison: Poison, tensor: torch.Tensor) -> None:
        self.poison = poison
        self.tensor = tensor
        super().__init__("poison")


class ProgramWriter:
    """Writes the function of a program.

    Args:
        worker: that runs it.
        program: the program.
        sites: of the program, made for this worker.
        last: for each step the slots that nobody needs after it.
        base: for numbers in the heap that nothing else has.
        regions: those that are compiled.

    Attributes:
        steps: for each line that is written, the step to which it belongs.
    """

    def __init__(
        self,
        worker: Interpreter,
        program: CompiledProgram,
        sites: Sequence[Site],
        last: Sequence[Sequence[int]],
        base: int,
        regions: Sequence[CompiledRegion],
    ) -> None:
        self.steps: list[int] = []
        self._worker = worker
        self._program = program
        self._sites = sites
        self._last = last
        self._base = base
        self._regions = {region.begin: region for region in regions}
        self._names: dict[str, Any] = {"alias": torch.ops.aten.alias.default._op, "laid_out": laid_out}
        self._operations: dict[int, _WrittenOperation] = {}
        self._lines: list[str] = []

    def write(self) -> Callable[[Heap, Sequence[int], int], None]:
        """The function; to be called once."""
        self._take_inputs()
        self._store_results(self._run_steps())
        exec(compile("\n".join(self._lines), f"<compiled {self._program.name}>", "exec"), self._names)
        function: Callable[[Heap, Sequence[int], int], None] = self._names["replay"]
        return function

    def _take_inputs(self) -> None:
        program = self._program
        self._add(0, "def replay(heap, code, at):", "    get = heap.get")
        first = 1 + len(program.outputs)
        for index, slot in enumerate(program.inputs):
            self._add(0, f"    v{slot} = get(code[at + {first + index}])")
        for slot in program.captured:
            self._add(0, f"    v{slot} = get({slot})")

    def _run_steps(self) -> set[int]:
        """Write the steps; the slots that may have None in place of a value."""
        maybe: set[int] = set()
        end = 0
        for index, step in enumerate(self._program.steps):
            if (region := self._regions.get(index)) is not None:
                self._region(region)
                end = region.end
            if index < end:
                continue
            form, description = self._program.sites[step.site]
            if form.maker == OPERATION:
                self._operation(index, step, description)
            else:
                maybe.update(step.outputs)
                self._call(index, step, form, description)
            if self._last[index]:
                self._add(index, "    del " + ", ".join(f"v{slot}" for slot in self._last[index]))
        return maybe

    def _store_results(self, maybe: set[int]) -> None:
        program = self._program
        end = max(len(program.steps) - 1, 0)
        targets = [(f"code[at + {1 + index}]", slot) for index, slot in enumerate(program.outputs)]
        targets += [(str(slot), slot) for slot in program.kept]
        for target, slot in targets:
            condition = f"if v{slot} is not None: " if slot in maybe else ""
            self._add(end, f"    {condition}heap[{target}] = v{slot}")

    def _region(self, region: CompiledRegion) -> None:
        results = "".join(f"v{slot}, " for slot in region.outputs)
        arguments = ", ".join(f"v{slot}" for slot in region.inputs)
        self._add(region.begin, f"    {results}= {self._name(region.run)}({arguments})")
        known = {*region.inputs, *region.outputs}
        over = [slot for step in range(region.begin, region.end) for slot in self._last[step] if slot in known]
        if over:
            self._add(region.begin, "    del " + ", ".join(f"v{slot}" for slot in over))

    def _add(self, step: int, *lines: str) -> None:
        self._lines += lines
        self.steps += [step] * len(lines)

    def _name(self, value: object) -> str:
        name = f"c{len(self._names)}"
        self._names[name] = value
        return name

    def _operation(self, index: int, step: ProgramStep, packed: bytes) -> None:
        known = self._operations.get(step.site)
        if known is None:
            known = self._operations[step.site] = _WrittenOperation(packed, self._sites[step.site], self._name)
        call = known.call(step)
        outputs = known.description.outputs
        if len(outputs) == 1 and not outputs[0][0] and known.checked[0] is None:
            self._add(index, f"    v{step.outputs[0]} = {call}")
            return
        if not outputs:
            self._add(index, f"    {call}")
            return
        self._add(index, f"    r = {call}")
        for slot, (path, _), expected in zip(step.outputs, outputs, known.checked, strict=True):
            found = "r" + "".join(f"[{place}]" for place in path)
            self._add(index, f"    v{slot} = {found if expected is None else f'laid_out({found}, {expected})'}")
        self._add(index, "    del r")

    def _call(self, index: int, step: ProgramStep, form: Form, description: Any) -> None:
        call = self._name(_caller(self._worker, index, step, form, description, self._base))
        results = "".join(f"v{slot}, " for slot in step.outputs)
        arguments = ", ".join(f"v{slot}" for slot in step.inputs)
        self._add(index, f"    {results}{'= ' if results else ''}{call}({arguments})")


class _WrittenOperation:
    """How the steps of an operation are written."""

    def __init__(self, packed: bytes, site: Site, name: Callable[[object], str]) -> None:
        self.description = description = Description.unpacked(packed)
        self._op = name(find(description.operation)._op)
        self._fixed: dict[int, str] = {}
        self._name = name
        self.checked: list[str | None] = [
            name(expected) if site.is_laid_out and index not in description.views else None
            for index, (_, expected) in enumerate(description.outputs)
        ]

    def call(self, step: ProgramStep) -> str:
        """The call of a step, as text."""
        arguments = [self._text(node, step) for node in self.description.args]
        if self.description.kwargs:
            named = ", ".join(f"{key!r}: {self._text(node, step)}" for key, node in self.description.kwargs.items())
            arguments.append(f"**{{{named}}}")
        return f"{self._op}({', '.join(arguments)})"

    def _text(self, node: Node, step: ProgramStep) -> str:
        kind, value = node
        if kind == INPUT:
            found = f"v{step.inputs[value]}"
            return f"alias({found})" if value in self.description.reshapes else found
        if kind == CONSTANT:
            return self._name(step.constants[value])
        if kind == FIXED:
            known = self._fixed.get(id(node))
            if known is None:
                plain = local(value) if isinstance(value, torch.device) else value
                known = self._fixed[id(node)] = self._name(plain)
            return known
        inner = ", ".join(self._text(each, step) for each in value)
        return f"[{inner}]" if kind == LIST else f"({inner},)" if value else "()"


def _caller(
    worker: Interpreter, index: int, step: ProgramStep, form: Form, description: Any, base: int
) -> Callable[..., Any]:
    """The function that a step calls if it is no operation of torch."""
    if form.maker != CALL:
        raise TypeError(f"{form.name} cannot be part of a program")
    call: FunctionCall = description
    function = resolve(call.function)
    constant = step.constants[0] if call.has_constant else None
    heap = worker.heap
    marks = [(place, base - index * 64 - place - 1) for place in call.writes]

    def run(*inputs: Any) -> Any:
        worker.step = index
        if not marks:
            return invoke(function, worker, call, list(inputs), constant)
        # What it writes is in the heap meanwhile: the call puts poison there if it cannot write.
        for place, mark in marks:
            if inputs[place] is not None:
                heap[mark] = inputs[place]
        try:
            results = invoke(function, worker, call, list(inputs), constant)
        finally:
            left = [(place, heap.pop(mark, None)) for place, mark in marks]
        for place, found in left:
            if type(found) is Poison and isinstance(inputs[place], torch.Tensor):
                raise WrittenPoisonError(found, inputs[place])
        return results

    return run
