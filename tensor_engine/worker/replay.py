"""The worker's side of compiled functions: a program becomes one generated function with a line for each step."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, cast

import torch

from skipper.tensor_engine.shared.encoding import Form
from skipper.tensor_engine.shared.program import CALL, OPERATION, CompiledProgram, ProgramStep
from skipper.tensor_engine.worker.calls import FunctionCall, invoke
from skipper.tensor_engine.worker.compiled_regions import CompiledRegion, regions_of
from skipper.tensor_engine.worker.heap import Heap, Poison, poison_storage
from skipper.tensor_engine.worker.interpreter import Interpreter, Run, Site, raising, resolve
from skipper.tensor_engine.worker.operations import Description, find, laid_out

_numbers = itertools.count(1)


def program_site(worker: Interpreter, site: Site, packed: bytes) -> Run:
    """Makes the worker's part of a program."""
    return Replay(worker, pickle.loads(packed)).run


class Replay:
    """A program on a worker.

    Replays run step by step, like single instructions, up to the first one in which no step fails; that one finds the
    layouts of the kernels' results. Later replays run the function that is then generated. If one of its steps fails,
    the values made so far go into the heap, and the rest runs step by step, with poison.

    If the program is to be compiled, its regions are compiled and tried during the first replay.

    Args:
        worker: that it runs on.
        program: what to run.
    """

    def __init__(self, worker: Interpreter, program: CompiledProgram) -> None:
        self._worker = worker
        self._program = program
        self._is_whole = True  # until a site cannot be made
        self._sites = [self._make(form, description) for form, description in program.sites]
        self._last = _last_uses(program)
        self._regions = {region.begin: region for region in regions_of(program)} if self._is_whole else {}
        # While it runs step by step, slots are in the heap under numbers that nothing else uses.
        self._base = -(next(_numbers) << 44)
        self._function: Callable[[Heap, Sequence[int], int], None] | None = None
        self._lines: list[int] = []

    def run(self, heap: Heap, code: Sequence[int], at: int, constants: Sequence[Any], constant: int) -> None:
        """Run it as one instruction."""
        if not self._program.borrows:
            self._run(heap, code, at)
            return
        self._worker.first_borrow = constants[constant]
        try:
            self._run(heap, code, at)
        finally:
            self._worker.first_borrow = 0

    def _run(self, heap: Heap, code: Sequence[int], at: int) -> None:
        if self._function is None:
            if self._step_by_step(heap, code, at, self._inputs(heap, code, at), 0):
                self._write()
            return
        try:
            self._function(heap, code, at)
        except Exception as error:  # noqa: BLE001  (what a step raises becomes its outputs' poison)
            trace = cast(TracebackType, cast(TracebackType, error.__traceback__).tb_next)
            failed = self._lines[trace.tb_lineno - 1]
            slots = {int(name[1:]): value for name, value in trace.tb_frame.f_locals.items() if name[1:].isdigit()}
            is_region = failed in self._regions and self._regions[failed].is_compiled
            # A region has changed nothing yet. Run one by one, its operations show which one fails.
            self._step_by_step(heap, code, at, slots, failed, None if is_region else error)
        finally:
            self._worker.step = None

    def _make(self, form: Form, description: Any) -> Site:
        site = Site(form)
        try:
            site.run = resolve(form.maker)(self._worker, site, description)
        except Exception as error:  # noqa: BLE001  (its steps fail with it: others may be what another stream waits for)
            site.run, self._is_whole = raising(error), False
        return site

    def _inputs(self, heap: Heap, code: Sequence[int], at: int) -> dict[int, Any]:
        program = self._program
        first = at + 1 + len(program.outputs)
        slots = {slot: heap.get(code[first + index]) for index, slot in enumerate(program.inputs)}
        slots.update((slot, heap.get(slot)) for slot in program.captured)
        return slots

    def _step_by_step(
        self,
        heap: Heap,
        code: Sequence[int],
        at: int,
        slots: dict[int, Any],
        begin: int,
        error: Exception | None = None,
    ) -> bool:
        """Run the steps from ``begin`` on. ``error``: what the first of them has already raised.

        Returns:
            Whether none has failed.
        """
        program, worker, base = self._program, self._worker, self._base
        is_fine = error is None
        used = {base + slot for slot in slots}
        region: CompiledRegion | None = None
        given: list[Any] = []
        heap.update((base + slot, value) for slot, value in slots.items() if value is not None)
        try:
            for index in range(begin, len(program.steps)):
                step = program.steps[index]
                if self._function is None and index in self._regions:
                    region = self._regions[index]
                    given = [heap.get(base + slot) for slot in region.inputs]
                site = self._sites[step.site]
                worker.step = index
                line = [0, *(base + slot for slot in step.outputs), *(base + slot for slot in step.inputs)]
                used.update(line[1 : 1 + site.outputs])
                if error is not None:
                    self._fail(heap, site, line, error)
                    error = None
                else:
                    try:
                        site.run(heap, line, 0, step.constants, 0)
                    except Exception as failure:  # noqa: BLE001  (as above)
                        self._fail(heap, site, line, failure)
                        is_fine = False
                if region is not None and index == region.end - 1:
                    region.attempt(given, [heap.get(base + slot) for slot in region.outputs])
                    region, given = None, []
                for slot in self._last[index]:
                    heap.pop(base + slot, None)
            for index, slot in enumerate(program.outputs):
                _store(heap, code[at + 1 + index], heap.get(base + slot))
            for slot in program.kept:
                _store(heap, slot, heap.get(base + slot))
            return is_fine
        finally:
            worker.step = None
            for ref in used:
                heap.pop(ref, None)

    def _fail(self, heap: Heap, site: Site, line: Sequence[int], error: Exception) -> None:
        if not isinstance(error, _WrittenPoisonError):
            self._worker.fail(site, line, 0, error)
            return
        for ref in line[1 : 1 + site.outputs]:
            heap[ref] = error.poisoned[0][1]
        for tensor, poison in error.poisoned:
            poison_storage(heap, tensor, poison)

    def _write(self) -> None:
        """Write the function that runs the whole program."""
        compiled = [region for region in self._regions.values() if region.is_compiled]
        writer = _ProgramWriter(self._worker, self._program, self._sites, self._last, self._base, compiled)
        self._function, self._lines = writer.write(), writer.steps


def _last_uses(program: CompiledProgram) -> list[tuple[int, ...]]:
    """For each step the slots that no later step needs."""
    staying = {*program.outputs, *program.kept}
    last: dict[int, int] = {}
    for index, step in enumerate(program.steps):
        for slot in (*step.inputs, *step.outputs):
            last[slot] = index
    uses: list[list[int]] = [[] for _ in program.steps]
    for slot, index in last.items():
        if slot not in staying:
            uses[index].append(slot)
    return [tuple(slots) for slots in uses]


def _store(heap: Heap, ref: int, value: Any) -> None:
    if value is not None:
        heap[ref] = value


class _WrittenPoisonError(Exception):
    """A call has left poison in what it writes: one or more tensors, each with its poison."""

    def __init__(self, poisoned: list[tuple[torch.Tensor, Poison]]) -> None:
        self.poisoned = poisoned
        super().__init__("poison")


class _ProgramWriter:
    """Generates the function of a program.

    ``last`` has for each step the slots that no later step needs. Only this program uses numbers from ``base`` on.

    Attributes:
        steps: for each generated line, its step.
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
        """Generate the function; called once."""
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
        """Generate the steps; returns the slots that may have None in place of a value."""
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
    """How the steps of an operation are generated."""

    def __init__(self, packed: bytes, site: Site, name: Callable[[object], str]) -> None:
        self.description = description = Description.unpacked(packed)
        self._op = name(find(description)._op)
        self._fixed: dict[int, str] = {}
        self._name = name
        self.checked: list[str | None] = [
            name(expected) if site.is_laid_out and index not in description.views else None
            for index, (_, expected) in enumerate(description.outputs)
        ]

    def call(self, step: ProgramStep) -> str:
        """The call of a step, as text."""
        return self.description.written(
            self._op,
            lambda index: f"v{step.inputs[index]}",
            lambda index: self._name(step.constants[index]),
            self._name_once,
        )

    def _name_once(self, value: Any) -> str:
        known = self._fixed.get(id(value))
        if known is None:
            known = self._fixed[id(value)] = self._name(value)
        return known


def _caller(
    worker: Interpreter, index: int, step: ProgramStep, form: Form, description: Any, base: int
) -> Callable[..., Any]:
    """The function that a step calls if it is not an operation of torch."""
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
        # During the call, what it writes is in the heap: the call puts poison there if it cannot write.
        for place, mark in marks:
            if inputs[place] is not None:
                heap[mark] = inputs[place]
        try:
            results = invoke(function, worker, call, list(inputs), constant)
        finally:
            left = [(place, heap.pop(mark, None)) for place, mark in marks]
        poisoned = [
            (inputs[place], found)
            for place, found in left
            if type(found) is Poison and isinstance(inputs[place], torch.Tensor)
        ]
        if poisoned:
            raise _WrittenPoisonError(poisoned)
        return results

    return run
