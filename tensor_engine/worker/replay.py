"""The worker's side of compiled functions: a program becomes one function, generated once."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, cast

from skipper.tensor_engine.shared.encoding import Form
from skipper.tensor_engine.shared.program import CompiledProgram
from skipper.tensor_engine.worker.compiled_regions import CompiledRegion, regions_of
from skipper.tensor_engine.worker.heap import Heap, poison_storage
from skipper.tensor_engine.worker.interpreter import Interpreter, Run, Site, resolve
from skipper.tensor_engine.worker.writer import ProgramWriter, WrittenPoisonError

_numbers = itertools.count(1)


def program_site(worker: Interpreter, site: Site, packed: bytes) -> Run:
    """The maker of the worker's part of a program."""
    return Replay(worker, pickle.loads(packed)).run


class Replay:
    """A program on a worker.

    The first replay in which no step fails runs step by step, as instructions do that come one by one, and sees how the
    kernels lay out what they return. Later ones run the function that is written out after that. Where one of its steps
    fails, what there is by then goes into the heap, and the rest runs step by step again, poison and all.

    Where the program is to be compiled, the regions that can be are tried beside the first replay, too.

    Args:
        worker: that it runs on.
        program: what to run.
    """

    def __init__(self, worker: Interpreter, program: CompiledProgram) -> None:
        self._worker = worker
        self._program = program
        self._sites = [self._make(form, description) for form, description in program.sites]
        self._last = _last_uses(program)
        self._regions = {region.begin: region for region in regions_of(program)}
        # While it runs step by step, slots are in the heap under numbers that nothing else has.
        self._base = -(next(_numbers) << 44)
        self._function: Callable[[Heap, Sequence[int], int], None] | None = None
        self._lines: list[int] = []

    def run(self, heap: Heap, code: Sequence[int], at: int, constants: Sequence[Any], constant: int) -> None:
        """Run it as one instruction."""
        if self._function is None:
            if self._step_by_step(heap, code, at, self._inputs(heap, code, at), 0):
                self._write()
            return
        try:
            self._function(heap, code, at)
        except Exception as error:  # noqa: BLE001  (whatever a step raises is its outputs' poison)
            trace = cast(TracebackType, cast(TracebackType, error.__traceback__).tb_next)
            failed = self._lines[trace.tb_lineno - 1]
            slots = {int(name[1:]): value for name, value in trace.tb_frame.f_locals.items() if name[1:].isdigit()}
            is_region = failed in self._regions and self._regions[failed].is_compiled
            # A region has changed nothing yet. Run one by one, its operations show which of them fails.
            self._step_by_step(heap, code, at, slots, failed, None if is_region else error)
        finally:
            self._worker.step = None

    def _make(self, form: Form, description: Any) -> Site:
        site = Site(form)
        site.run = resolve(form.maker)(self._worker, site, description)
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
        """Run the steps from ``begin`` on; with an error, that is what the first of them has raised.

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
        if not isinstance(error, WrittenPoisonError):
            self._worker.fail(site, line, 0, error)
            return
        for ref in line[1 : 1 + site.outputs]:
            heap[ref] = error.poison
        poison_storage(heap, error.tensor, error.poison)

    def _write(self) -> None:
        """Write the function that runs the whole program."""
        compiled = [region for region in self._regions.values() if region.is_compiled]
        writer = ProgramWriter(self._worker, self._program, self._sites, self._last, self._base, compiled)
        self._function, self._lines = writer.write(), writer.steps


def _last_uses(program: CompiledProgram) -> list[tuple[int, ...]]:
    """For each step the slots that nobody needs after it."""
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
