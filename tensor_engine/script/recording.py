"""The recorder of a trace: it notes the instructions of a function that is being compiled, while they are issued."""

from __future__ import annotations

import contextvars
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from skipper.tensor_engine.errors import CompileError
from skipper.tensor_engine.script.call_site import CallSite
from skipper.tensor_engine.script.instruction_stream import InstructionStream
from skipper.tensor_engine.script.value import TensorStorage, Value
from skipper.tensor_engine.shared.stacks import Stack, line_of_script


@dataclass(frozen=True, slots=True)
class Noted:
    """One instruction.

    Attributes:
        instruction_stream: that it was issued on.
        site: what is done.
        outputs: numbers of the values that come out.
        inputs: numbers of those that go in.
        constants: its constants.
        stack: where the script issued it.
    """

    instruction_stream: InstructionStream
    site: CallSite
    outputs: tuple[int, ...]
    inputs: tuple[int, ...]
    constants: tuple[Any, ...]
    stack: Stack


class TraceRecorder:
    """Notes what the thread that made it issues.

    Attributes:
        instructions: in their order.
        made: values that came into being, by number.
        read: values from outside that went into instructions or were asked for, by number.
        storages: of all of these, by number of the value.
        met: tensors that were used, and the value that each stood for when it was first met.
        leaves: tensors that may get a gradient, by identity.
        foreign: whether an input comes from operations outside of the function that autograd has recorded.
        borrows: those that the function has begun and not ended, by number: what ends each, and where it began.
        refusal: why this cannot be compiled, where an error has been raised that may have been caught.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.instructions: list[Noted] = []
        self.made: dict[int, weakref.ref[Value]] = {}
        self.read: dict[int, weakref.ref[Value]] = {}
        self.storages: dict[int, TensorStorage] = {}
        self.met: dict[int, tuple[weakref.ref[torch.Tensor], weakref.ref[Value]]] = {}
        self.leaves: dict[int, torch.Tensor] = {}
        self.foreign = False
        self.borrows: dict[int, tuple[Callable[[], None], str]] = {}
        self.refusal: CompileError | None = None

    @property
    def is_here(self) -> bool:
        """Whether it is this thread that is recorded."""
        return threading.get_ident() == self.thread

    def note(
        self,
        instruction_stream: InstructionStream,
        site: CallSite,
        made: Sequence[Value],
        inputs: Sequence[int],
        constants: Sequence[Any],
        stack: Stack,
    ) -> None:
        """An instruction has been issued, which makes some values; the other arguments are those of `Noted`."""
        if not self.is_here:
            return
        for value in made:
            self.made[value.ref] = weakref.ref(value)
            self.storages[value.ref] = value.storage
        outputs = tuple(value.ref for value in made)
        self.instructions.append(Noted(instruction_stream, site, outputs, tuple(inputs), tuple(constants), stack))

    def note_value(self, value: Value) -> None:
        """A value goes into an instruction."""
        if not self.is_here:
            return
        self.storages[value.ref] = value.storage
        if value.ref not in self.made:
            self.read[value.ref] = weakref.ref(value)

    def note_tensor(self, tensor: torch.Tensor, value: Value) -> None:
        """A tensor of a mesh is used."""
        self.note_value(value)
        if not self.is_here or value.ref in self.made:
            return
        if id(tensor) not in self.met:
            self.met[id(tensor)] = (weakref.ref(tensor), weakref.ref(value))
        if tensor.requires_grad:
            if tensor.is_leaf:
                self.leaves[id(tensor)] = tensor
            else:
                self.foreign = True

    def end_borrows(self) -> None:
        """End the borrows that are open when the function has returned or raised; it cannot be compiled then."""
        while self.borrows:
            _, (end, begin) = self.borrows.popitem()  # the last one first: it may have been lent on
            end()
            self.refusal = self.refusal or CompileError(
                f"a borrow that began at {begin} was open at the end of the compiled function, and a replay could "
                "not end it: end it in the function, by `with stream.borrow(tensor) as x:` or drop()"
            )


current: TraceRecorder | None = None
"""The recorder of the function that is being traced: one at a time, in any thread; None if there is none."""


traced: contextvars.ContextVar[TraceRecorder | None] = contextvars.ContextVar("traced", default=None)
"""The same where the thread is of no help: a coroutine that another one runs has the context of its caller."""


def is_tracing() -> bool:
    """Whether a function is being compiled in this thread."""
    return current is not None and current.is_here


def refuse(what: str, instead: str) -> None:
    """Refuse what cannot be compiled, if a function is being compiled in this thread, or in that for which it works.

    Raises:
        CompileError: it is.
    """
    recorder = current
    if recorder is not None and (recorder.is_here or recorder is traced.get()):
        recorder.refusal = CompileError(f"{what} cannot be part of a compiled function: {instead}")
        raise recorder.refusal


def note_borrow(number: int, end: Callable[[], None]) -> None:
    """A borrow has begun, which is ended by a call of ``end``."""
    recorder = current
    if recorder is not None and recorder.is_here:
        recorder.borrows[number] = end, line_of_script()


def note_end_of_borrow(number: int) -> None:
    """A borrow is about to end.

    Raises:
        CompileError: a function is being compiled in this thread, and the borrow began outside of it.
    """
    recorder = current
    if recorder is not None and recorder.is_here and recorder.borrows.pop(number, None) is None:
        refuse(
            "the end of a borrow that began outside",
            "it would happen once. End it outside, or have the function borrow the tensor itself",
        )
