"""`CompiledProgram`: the instructions of a compiled function as they are sent to the workers, once."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

from skipper.tensor_engine.shared.encoding import Form

OPERATION = "skipper.tensor_engine.worker.operations:operation_site"
CALL = "skipper.tensor_engine.worker.calls:call_site"
"""The makers of sites that can be in a program: see `Form.maker`."""


@dataclass(frozen=True, slots=True)
class ProgramStep:
    """An instruction of a program.

    Attributes:
        site: number of its site in the program.
        outputs: slots of the values that come out.
        inputs: slots of those that go in.
        constants: its constants.
    """

    site: int
    outputs: tuple[int, ...]
    inputs: tuple[int, ...]
    constants: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class CompiledProgram:
    """What the workers of one instruction stream do in a replay.

    Slots have the numbers that the values had in the trace.

    Attributes:
        name: for people.
        sites: what its steps do: how the instructions look, and what the maker of each is told.
        steps: in their order.
        inputs: slots of the values that each replay's instruction names as its inputs.
        captured: slots of values that are always the same ones, found in the heap under that number.
        outputs: slots of the values that each replay's instruction gives numbers to.
        kept: slots of values that are found in the heap under that number afterwards, in place of the last replay's.
        backend: of `torch.compile`, by which the workers compile what they can of it; None for none.
    """

    name: str
    sites: tuple[tuple[Form, Any], ...]
    steps: tuple[ProgramStep, ...]
    inputs: tuple[int, ...]
    captured: tuple[int, ...]
    outputs: tuple[int, ...]
    kept: tuple[int, ...]
    backend: str | None = None

    def packed(self) -> bytes:
        """As bytes, once for all workers."""
        return pickle.dumps(self, protocol=5)
