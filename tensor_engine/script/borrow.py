"""How a stream borrows a tensor of another one: the script's part of `Stream.borrow`."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any, cast

import torch

from skipper.tensor_engine.errors import BorrowedTensorError, StreamMismatchError
from skipper.tensor_engine.script import recording
from skipper.tensor_engine.script.instruction_stream import InstructionStream, StreamKey
from skipper.tensor_engine.script.issue import issue_call
from skipper.tensor_engine.script.streams import Borrow
from skipper.tensor_engine.script.tensor import Tensor, value_of
from skipper.tensor_engine.script.value import Value
from skipper.tensor_engine.shared.program import GET_BACK, GIVE_BACK, LEND, TAKE

_numbers = itertools.count(1 << 40)
"""Calls of actors' endpoints use the same rendezvous points, with numbers from 1 on; for replays see `traced`."""


def borrow(stream: StreamKey, tensor: torch.Tensor, *, mutable: bool) -> Borrow:
    """See `Stream.borrow`."""
    source = value_of(tensor)
    lender = source.instruction_stream.stream
    if lender == stream:
        raise StreamMismatchError(f"the tensor belongs to the stream {stream.name!r} already")
    if mutable:
        source.storage.refuse_change()
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise RuntimeError(
                "autograd does not see what a borrower changes: borrow tensor.detach(), or do it under torch.no_grad()"
            )
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)  # autograd must not use the version that it has saved
    session = source.instruction_stream.session
    number = next(_numbers)
    _tell(LEND, source.instruction_stream, source, number)
    # The borrower waits for this instruction, so the instruction must not stay in the batch.
    with session.lock:
        source.instruction_stream.flush()
    (taken,) = issue_call(
        TAKE,
        (),
        (source.meta,),
        instruction_stream=session.instruction_stream(source.mesh, stream),
        mesh=source.mesh,
        name="borrow",
        constant=number,
        sees_poison=True,
    )
    borrowed = taken.remote_value
    _bar(source, borrowed, lender.name, stream.name, mutable=mutable)
    if torch.is_grad_enabled() and tensor.requires_grad:
        taken = cast(Tensor, _Lent.apply(tensor, taken))  # type: ignore[no-untyped-call]
    begun = Borrow(taken, lender.name, partial(_give_back, source, borrowed, number, mutable))
    recording.note_borrow(number, begun.drop)
    return begun


def _bar(source: Value, borrowed: Value, lender: str, borrower: str, *, mutable: bool) -> None:
    """Note what each stream cannot do with the tensor while it is lent."""
    source.storage.lent += 1
    why = f"the tensor of the stream {lender!r} is lent to {borrower!r}"
    if mutable:
        source.storage.barred = BorrowedTensorError(f"{why}, which may change it: use it after borrow.drop()")
        return
    frozen = BorrowedTensorError(f"{why}, to be read: it can be changed after borrow.drop()")
    source.storage.frozen = source.storage.frozen or frozen
    borrowed.storage.keeps_frozen = True
    borrowed.storage.frozen = BorrowedTensorError(
        f"the tensor is borrowed from the stream {lender!r} to be read: mutable=True is to change it"
    )


def _give_back(source: Value, borrowed: Value, number: int, mutable: bool, how: str) -> None:
    """End a borrow: ``how`` says by what, and where in the script.

    Raises:
        BorrowedTensorError: the borrower has lent the tensor to another stream.
        CompileError: a function is being compiled, and the borrow began outside of it.
    """
    borrower = borrowed.instruction_stream
    if borrowed.storage.lent:
        raise BorrowedTensorError(
            f"the stream {borrower.stream.name!r} has itself lent this tensor to another stream: end that borrow first"
        )
    recording.note_end_of_borrow(number)
    source.storage.lent -= 1
    if not source.storage.lent:
        source.storage.barred = None
        if not source.storage.keeps_frozen:
            source.storage.frozen = None
    borrowed.storage.barred = BorrowedTensorError(f"the tensor was borrowed, and has been given back {how}")
    session = borrower.session
    if session.is_closed or borrower.lost is not None:
        return  # no worker is left to tell
    _tell(GIVE_BACK, borrower, borrowed, number)
    borrower.freed.append(borrowed.ref)
    with session.lock:
        borrower.flush()
    _tell(GET_BACK, source.instruction_stream, source, number, writes=(0,) if mutable else ())


def _tell(
    what: str, instruction_stream: InstructionStream, value: Value, number: int, writes: tuple[int, ...] = ()
) -> None:
    issue_call(
        what,
        (value,),
        (),
        instruction_stream=instruction_stream,
        mesh=value.mesh,
        name="borrow",
        constant=number,
        sees_poison=True,
        writes=writes,
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
