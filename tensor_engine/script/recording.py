"""The recorder of a trace: it records the instructions of a function that is being compiled, as they are issued."""

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
        instruction_stream: the one that it was issued on.
        site: the operation.
        outputs: numbers of the output values.
        inputs: numbers of the input values.
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
    """Records what its creating thread issues.

    Attributes:
        instructions: in their order.
        made: values that were created, by number.
        read: values from outside that instructions or queries used, by number.
        storages: of all of these, by number of the value.
        met: tensors that were used, and the value of each at its first use.
        leaves: tensors that may get a gradient, by identity.
        foreign: whether an input comes from operations that autograd has recorded outside of the function.
        borrows: the borrows that the function has begun and not ended, by number: what ends each, and where it began.
        refusal: why this cannot be compiled, if an error was raised that may have been caught.
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
        """Whether this thread is being recorded."""
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
        """Record an instruction, which makes some values; the other arguments are those of `Noted`."""
        if not self.is_here:
            return
        for value in made:
            self.made[value.ref] = weakref.ref(value)
            self.storages[value.ref] = value.storage
        outputs = tuple(value.ref for value in made)
        self.instructions.append(Noted(instruction_stream, site, outputs, tuple(inputs), tuple(constants), stack))

    def note_value(self, value: Value) -> None:
        """Record that a value is the input of an instruction."""
        if not self.is_here:
            return
        self.storages[value.ref] = value.storage
        if value.ref not in self.made:
            self.read[value.ref] = weakref.ref(value)

    def note_tensor(self, tensor: torch.Tensor, value: Value) -> None:
        """Record that a tensor of a mesh is used."""
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
        """End the borrows that are open when the function has returned or raised; then it cannot be compiled."""
        while self.borrows:
            _, (end, begin) = self.borrows.popitem()  # the last one first: it may have been lent to another stream
            end()
            self.refusal = self.refusal or CompileError(
                f"a borrow that began at {begin} was open at the end of the compiled function, and a replay could "
                "not end it: end it in the function, by `with stream.borrow(tensor) as x:` or drop()"
            )


current: TraceRecorder | None = None
"""The recorder of the function that is being traced: one at a time, in any thread; None if there is none."""


traced: contextvars.ContextVar[TraceRecorder | None] = contextvars.ContextVar("traced", default=None)
"""The same by context: a coroutine that another thread runs has the context of its caller."""


def is_tracing() -> bool:
    """Whether a function is being compiled in this thread."""
    return current is not None and current.is_here


def refuse(what: str, instead: str) -> None:
    """Refuse what cannot be compiled, if a function is being compiled in this thread, or in the thread it works for.

    Raises:
        CompileError: it is.
    """
    recorder = current
    if recorder is not None and (recorder.is_here or recorder is traced.get()):
        recorder.refusal = CompileError(f"{what} cannot be part of a compiled function: {instead}")
        raise recorder.refusal


def note_borrow(number: int, end: Callable[[], None]) -> None:
    """Record the start of a borrow; a call of ``end`` ends it."""
    recorder = current
    if recorder is not None and recorder.is_here:
        recorder.borrows[number] = end, line_of_script()


def note_end_of_borrow(number: int) -> None:
    """Record the end of a borrow, before it ends.

    Raises:
        CompileError: a function is being compiled in this thread, and the borrow began outside of it.
    """
    recorder = current
    if recorder is not None and recorder.is_here and recorder.borrows.pop(number, None) is None:
        refuse(
            "the end of a borrow that began outside",
            "it would happen once. End it outside, or have the function borrow the tensor itself",
        )
