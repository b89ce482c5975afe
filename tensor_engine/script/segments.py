"""`Segment`: instructions of a trace that go to the same workers in one message, and the program that they make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skipper.tensor_engine.script.instruction_stream import InstructionStream
from skipper.tensor_engine.script.recording import Noted
from skipper.tensor_engine.shared.encoding import Form
from skipper.tensor_engine.shared.program import Program, Step


class Segment:
    """Instructions of a trace that go to one instruction stream in one message.

    Attributes:
        instruction_stream: to which they go.
        instructions: in their order.
    """

    def __init__(self, instruction_stream: InstructionStream) -> None:
        self.instruction_stream = instruction_stream
        self.instructions: list[Noted] = []

    def program(
        self, name: str, given: set[int], wanted: set[int], kept: set[int], backend: str | None = None
    ) -> Program:
        """What the workers of the instruction stream are told.

        Args:
            name: for people.
            given: values that come anew with each replay.
            wanted: values that are needed elsewhere, in a replay or after it.
            kept: values that stay under the number that they have in the trace.
            backend: for `Program.backend`.
        """
        sites: dict[int, int] = {}
        descriptions: list[tuple[Form, Any]] = []
        steps: list[Step] = []
        made: dict[int, None] = {}
        inputs: dict[int, None] = {}
        captured: dict[int, None] = {}
        for each in self.instructions:
            number = sites.get(each.site.number)
            if number is None:
                number = sites[each.site.number] = len(descriptions)
                descriptions.append((each.site.form, each.site.description))
            for ref in each.inputs:
                if ref not in made:
                    (inputs if ref in given else captured)[ref] = None
            made.update(dict.fromkeys(each.outputs))
            steps.append(Step(number, each.outputs, each.inputs, each.constants))
        return Program(
            name,
            tuple(descriptions),
            tuple(steps),
            tuple(inputs),
            tuple(captured),
            tuple(ref for ref in made if ref in wanted),
            tuple(ref for ref in made if ref in kept),
            backend,
        )


def segments_of(instructions: Sequence[Noted]) -> list[Segment]:
    """Cut a trace into as few segments as keep the order of instructions on every worker."""
    segments: list[Segment] = []
    for each in instructions:
        place = _place(segments, each.instruction_stream)
        if place is None:
            place = Segment(each.instruction_stream)
            segments.append(place)
        place.instructions.append(each)
    return segments


def _place(segments: Sequence[Segment], instruction_stream: InstructionStream) -> Segment | None:
    """The segment to which the next instruction may be added: no later one concerns the same workers."""
    for segment in reversed(segments):
        if segment.instruction_stream is instruction_stream:
            return segment
        if (
            segment.instruction_stream.session is instruction_stream.session
            and segment.instruction_stream.members & instruction_stream.members
        ):
            return None
    return None
