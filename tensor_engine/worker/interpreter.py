"""The worker's side of instructions. Each *site* is resolved once; its instructions only select values and run."""

from __future__ import annotations

import functools
import importlib
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from skipper.tensor_engine.shared.encoding import FREE, Definition, Form
from skipper.tensor_engine.worker.heap import Heap, Poison, poison_storage

Run = Callable[[Heap, Sequence[int], int, Sequence[Any], int], None]
"""Runs one instruction: the heap, the code, the position in it, the constants, and the position in them."""


class Site:
    """What an instruction does, on this worker.

    Attributes:
        name: for people.
        outputs: how many numbers of outputs an instruction has.
        constants: how many constants it takes.
        width: of an instruction.
        writes: which inputs it changes; they are poisoned, with everything that shares their storage, if it fails.
        is_laid_out: whether its results must be copied to the layout that the script expects.
        run: runs one instruction.
    """

    __slots__ = ("constants", "is_laid_out", "name", "outputs", "run", "width", "writes")

    run: Run

    def __init__(self, form: Form) -> None:
        self.name = form.name
        self.outputs = form.outputs
        self.constants = form.constants
        self.width = 1 + form.outputs + form.inputs
        self.writes = form.writes
        self.is_laid_out = False


class Interpreter:
    """Runs the instructions of one stream on one worker. It never raises: failures leave poison.

    Attributes:
        session: number of the session.
        stream: number of the stream; 0 is the main one.
        rank: of this worker in the root mesh of the session.
        extent: axes and sizes of that mesh.
        heap: values by number, shared by the streams of the session in this process.
        number: of this worker, unique in the script; a replacement process has another one.
        first_borrow: the base of the numbers of borrows in instructions: not 0 within a replay.
        own: further state of the functions of instructions, by names that they choose.
    """

    def __init__(
        self,
        session: int,
        stream: int,
        rank: int,
        extent: Any,
        heap: Heap,
        report: Callable[[Poison], None],
        number: int = 0,
    ) -> None:
        self.session = session
        self.stream = stream
        self.rank = rank
        self.extent = extent
        self.heap = heap
        self.number = number
        self.own: dict[str, Any] = {}
        self.instruction_stream = 0
        self.sequence = 0
        self.step: int | None = None  # within a compiled program
        self.first_borrow = 0
        self._report = report
        self._sites: dict[int, Site] = {}

    def define(self, definitions: Sequence[Definition]) -> list[int]:
        """Make sites.

        Returns:
            The numbers of sites to forget: they come without a form, and the batch may still use them.
        """
        forgotten: list[int] = []
        for number, form, description in definitions:
            if form is None:
                forgotten.append(number)
                continue
            if number in self._sites:
                continue  # it is sent again, since another worker of the instruction stream is new
            site = self._sites[number] = Site(form)
            try:
                site.run = resolve(form.maker)(self, site, description)
            except Exception as error:  # noqa: BLE001  (its instructions fail with it, as if they had raised it)
                site.run = raising(error)
        return forgotten

    def forget(self, numbers: Sequence[int]) -> None:
        """Forget sites."""
        for number in numbers:
            self._sites.pop(number, None)

    def close(self) -> None:
        """Close the closable objects that the functions of instructions keep in ``own``."""
        for kept in reversed(self.own.values()):
            if callable(close := getattr(kept, "close", None)):
                close()
        self.own.clear()

    def execute(self, instruction_stream: int, first: int, code: Sequence[int], constants: Sequence[Any]) -> int:
        """Run the instructions of a batch.

        Args:
            instruction_stream: number of the instruction stream of the batch.
            first: number of its first instruction there.
            code: the instructions.
            constants: the constants of these.

        Returns:
            The number of the next instruction.
        """
        heap, sites = self.heap, self._sites
        at = constant = 0
        end = len(code)
        self.instruction_stream = instruction_stream
        sequence = first
        with torch.no_grad():
            while at < end:
                number = code[at]
                if number == FREE:
                    count = code[at + 1]
                    for ref in code[at + 2 : at + 2 + count]:
                        heap.pop(ref, None)
                    at += 2 + count
                    continue
                site = sites[number]
                self.sequence = sequence
                try:
                    site.run(heap, code, at, constants, constant)
                except Exception as error:  # noqa: BLE001  (what an operation raises becomes its outputs' poison)
                    self.fail(site, code, at, error)
                at += site.width
                constant += site.constants
                sequence += 1
        return sequence

    def poison(self, operation: str, error: BaseException) -> Poison:
        """New poison for the current instruction, reported to the script."""
        summary = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        trace = "".join(traceback.format_exception(error))
        poison = Poison(self.rank, self.instruction_stream, self.sequence, operation, summary, trace, self.step)
        self._report(poison)
        return poison

    def fail(self, site: Site, code: Sequence[int], at: int, error: Exception) -> None:
        """Put poison in place of an instruction's outputs: the poison of its inputs, or new poison for the error."""
        heap = self.heap
        outputs = code[at + 1 : at + 1 + site.outputs]
        inputs = code[at + 1 + site.outputs : at + site.width]
        found = next((value for ref in inputs if isinstance(value := heap.get(ref), Poison)), None)
        poison = self.poison(site.name, error) if found is None else found
        for ref in outputs:
            heap[ref] = poison
        for index in site.writes:
            value = heap.get(inputs[index])
            heap[inputs[index]] = poison
            if isinstance(value, torch.Tensor):
                poison_storage(heap, value, poison)


@functools.cache
def resolve(path: str) -> Any:
    """The object at ``module:name``."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def raising(error: Exception) -> Run:
    """A function to run in place of a site that could not be made."""

    def run(heap: Heap, code: Sequence[int], at: int, constants: Sequence[Any], constant: int) -> None:
        raise error

    return run
