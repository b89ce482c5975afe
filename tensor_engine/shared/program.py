"""`CompiledProgram`: the instructions of a compiled function as they are sent to the workers, once."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

from skipper.tensor_engine.shared.encoding import Form

OPERATION = "skipper.tensor_engine.worker.operations:operation_site"
CALL = "skipper.tensor_engine.worker.calls:call_site"
"""The makers of sites that can be in a program: see `Form.maker`."""

LEND = "skipper.tensor_engine.worker.handover:lend"
TAKE = "skipper.tensor_engine.worker.handover:take"
GIVE_BACK = "skipper.tensor_engine.worker.handover:give_back"
GET_BACK = "skipper.tensor_engine.worker.handover:get_back"
"""The parts of a borrow. `TAKE` waits for `LEND`, and `GET_BACK` for `GIVE_BACK`, of the same number."""


@dataclass(frozen=True, slots=True)
class ProgramStep:
    """An instruction of a program.

    Attributes:
        site: number of its site in the program.
        outputs: slots of the values that come out.
        inputs: slots of the values that go in.
        constants: its constants. A part of a borrow has an offset to the number that each replay gives.
    """

    site: int
    outputs: tuple[int, ...]
    inputs: tuple[int, ...]
    constants: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class CompiledProgram:
    """The work of one instruction stream's workers in a replay.

    Slots have the numbers that the values had in the trace.

    Attributes:
        name: for people.
        sites: what its steps do: the form of the instructions, and the description for the maker of each.
        steps: its instructions, in order.
        inputs: slots of the values that each replay's instruction names as its inputs.
        captured: slots of values that are the same in each replay; the heap has them under that number.
        outputs: slots of the values to which each replay's instruction gives numbers.
        kept: slots of values that the heap has under that number afterwards, in place of those of the last replay.
        borrows: whether parts of borrows are among its steps, and each replay gives a number for them.
        backend: backend of `torch.compile` with which the workers compile what they can of it; None: no backend.
    """

    name: str
    sites: tuple[tuple[Form, Any], ...]
    steps: tuple[ProgramStep, ...]
    inputs: tuple[int, ...]
    captured: tuple[int, ...]
    outputs: tuple[int, ...]
    kept: tuple[int, ...]
    borrows: bool = False
    backend: str | None = None

    def packed(self) -> bytes:
        """As bytes, once for all workers."""
        return pickle.dumps(self, protocol=5)
