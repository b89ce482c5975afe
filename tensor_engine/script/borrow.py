"""`Borrow`: a tensor of one stream, used on another one for a while."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch

from skipper.tensor_engine.errors import BorrowedTensorError, StreamMismatchError
from skipper.tensor_engine.script import recording
from skipper.tensor_engine.script.issue import issue_call
from skipper.tensor_engine.script.tensor import Tensor, Value, value_of

if TYPE_CHECKING:
    from skipper.tensor_engine.script.instruction_stream import InstructionStream
    from skipper.tensor_engine.script.streams import Stream

_numbers = itertools.count(1 << 40)  # calls of actors' endpoints, which meet at the same places, count from 1


class Borrow:
    """A tensor that a stream has borrowed: `Stream.borrow` makes it.

    Attributes:
        tensor: the borrowed tensor, of the borrowing stream; it and its views cannot be used after `drop`.
    """

    def __init__(self, stream: Stream, tensor: torch.Tensor, *, mutable: bool) -> None:
        self._is_over = True  # until it has begun
        recording.refuse("a borrow", "borrow what the compiled function needs before its call")
        self._source = source = value_of(tensor)
        self._mutable = mutable
        lender, borrower = source.instruction_stream.stream.name, stream.name
        if source.instruction_stream.stream == stream.key:
            raise StreamMismatchError(f"the tensor belongs to the stream {borrower!r} already")
        if mutable:
            source.storage.refuse_change()
            if torch.is_grad_enabled() and tensor.requires_grad:
                raise RuntimeError(
                    "what a borrower changes is unseen by autograd: borrow tensor.detach(), or do it under "
                    "torch.no_grad()"
                )
        session = source.instruction_stream.session
        self._instruction_stream = session.instruction_stream(source.mesh, stream.key)
        self._number = next(_numbers)
        self._tell("lend", source.instruction_stream, source)
        # What waits for it must not hold it up.
        with session.lock:
            source.instruction_stream.flush()
        (taken,) = issue_call(
            "skipper.tensor_engine.worker.lending:take",
            (),
            (source.meta,),
            instruction_stream=self._instruction_stream,
            mesh=source.mesh,
            name="borrow",
            constant=self._number,
            has_constant=True,
            sees_poison=True,
        )
        self._borrowed: Value = taken._value
        source.storage.lent += 1
        why = f"the tensor of the stream {lender!r} is lent to {borrower!r}"
        if mutable:
            source.storage.barred = BorrowedTensorError(f"{why}, which may change it: use it after borrow.drop()")
        else:
            frozen = BorrowedTensorError(f"{why}, to be read: it can be changed after borrow.drop()")
            source.storage.frozen = source.storage.frozen or frozen
            self._borrowed.storage.keeps_frozen = True
            self._borrowed.storage.frozen = BorrowedTensorError(
                f"the tensor is borrowed from the stream {lender!r} to be read: mutable=True is to change it"
            )
        self._is_over = False
        self.tensor: Tensor = taken
        if torch.is_grad_enabled() and tensor.requires_grad:
            self.tensor = cast(Tensor, _Lent.apply(tensor, taken))  # type: ignore[no-untyped-call]

    def drop(self) -> None:
        """Give the tensor back. It may be called again.

        Raises:
            BorrowedTensorError: it has been lent on.
        """
        if self._is_over:
            return
        source, borrowed = self._source, self._borrowed
        if borrowed.storage.lent:
            raise BorrowedTensorError(
                f"the tensor has been lent on by the stream {self._instruction_stream.stream.name!r}: that borrow "
                "has to end first"
            )
        self._is_over = True
        source.storage.lent -= 1
        if not source.storage.lent:
            source.storage.barred = None
            if not source.storage.keeps_frozen:
                source.storage.frozen = None
        borrowed.storage.barred = BorrowedTensorError("the tensor was borrowed, and has been given back")
        session = self._instruction_stream.session
        if session.is_closed or self._instruction_stream.lost is not None:
            return  # there is nobody left to whom it matters
        self._tell("give_back", self._instruction_stream, borrowed)
        self._instruction_stream.freed.append(borrowed.ref)
        with session.lock:
            self._instruction_stream.flush()
        self._tell("get_back", source.instruction_stream, source)

    def __enter__(self) -> Tensor:
        return self.tensor

    def __exit__(self, *exc_info: object) -> None:
        self.drop()

    def __iter__(self) -> Iterator[Any]:
        return iter((self.tensor, self))

    def __del__(self) -> None:
        if not self._is_over:
            warnings.warn(
                f"a tensor of the stream {self._source.instruction_stream.stream.name!r} was borrowed and never given "
                "back: it stays lent. Use `with stream.borrow(tensor) as x:`, or call drop()",
                ResourceWarning,
                stacklevel=2,
            )

    def _tell(self, what: str, instruction_stream: InstructionStream, value: Value) -> None:
        issue_call(
            f"skipper.tensor_engine.worker.lending:{what}",
            (value,),
            (),
            instruction_stream=instruction_stream,
            mesh=value.mesh,
            name="borrow",
            constant=self._number,
            has_constant=True,
            sees_poison=True,
        )


class _Lent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, taken: Tensor) -> Tensor:
        ctx.stream = tensor.stream
        return cast(Tensor, taken.detach())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        if value_of(grad).instruction_stream.stream == ctx.stream.key:
            return grad, None
        with ctx.stream.borrow(grad) as lent:
            return lent.clone(), None
