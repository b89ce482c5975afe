"""What a trace takes note of: the instructions of a function that is being compiled, while they are issued."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skipper.tensor_engine.errors import CompileError

if TYPE_CHECKING:
    from skipper.tensor_engine.script.instruction_stream import InstructionStream
    from skipper.tensor_engine.script.propagation import CallSite
    from skipper.tensor_engine.script.tensor import Storage, Tensor, Value
    from skipper.tensor_engine.shared.stacks import Stack


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


class Recorder:
    """Notes what one thread issues.

    Attributes:
        instructions: in their order.
        made: values that came into being, by number.
        read: values from outside that went into instructions or were asked for, by number.
        storages: of all of these, by number of the value.
        met: tensors that were used, and the value that each stood for when it was first met.
        leaves: tensors that may get a gradient, by identity.
        foreign: whether an input hangs on autograd's graph of something outside of the function.
        refusal: why this cannot be compiled, where an error has been raised that may have been caught.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.instructions: list[Noted] = []
        self.made: dict[int, weakref.ref[Value]] = {}
        self.read: dict[int, weakref.ref[Value]] = {}
        self.storages: dict[int, Storage] = {}
        self.met: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Value]]] = {}
        self.leaves: dict[int, Tensor] = {}
        self.foreign = False
        self.refusal: CompileError | None = None

    @property
    def is_here(self) -> bool:
        """Whether it is this thread that is recorded."""
        return threading.get_ident() == self.thread

    def note(
        self,
        instruction_stream: InstructionStream,
        site: CallSite,
        outputs: Sequence[int],
        inputs: Sequence[int],
        constants: Sequence[Any],
        stack: Stack,
    ) -> None:
        """An instruction is issued."""
        if self.is_here:
            noted = Noted(instruction_stream, site, tuple(outputs), tuple(inputs), tuple(constants), stack)
            self.instructions.append(noted)

    def note_made(self, value: Value) -> None:
        """A value comes into being."""
        if self.is_here:
            self.made[value.ref] = weakref.ref(value)
            self.storages[value.ref] = value.storage

    def note_value(self, value: Value) -> None:
        """A value goes into an instruction."""
        if not self.is_here:
            return
        self.storages[value.ref] = value.storage
        if value.ref not in self.made:
            self.read[value.ref] = weakref.ref(value)

    def note_tensor(self, tensor: Tensor) -> None:
        """A tensor is used."""
        value = tensor._value
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


current: Recorder | None = None
"""What records just now, for one function at a time."""


def is_tracing() -> bool:
    """Whether a function is being compiled in this thread."""
    return current is not None and current.is_here


def refuse(what: str, instead: str) -> None:
    """Say that something cannot be compiled, if a function is being compiled in this thread.

    Raises:
        CompileError: it is.
    """
    recorder = current
    if recorder is not None and recorder.is_here:
        recorder.refusal = CompileError(f"{what} cannot be part of a compiled function: {instead}")
        raise recorder.refusal
