"""A tensor that has been given up is named with the line of the script that gave it up."""

import contextlib
import inspect as source
import pickle
from collections.abc import Callable

import pytest
import torch

from skipper.control import ProcMesh
from skipper.tensor_engine import BorrowedTensorError, DroppedTensorError, Stream, compile, inspect, reduce, remote
from tests.tensor_engine import user_functions as functions
from tests.tensor_engine.looking import numbers

side = Stream("side of what is dropped")


def line_of(mark: str, function: Callable[..., object]) -> str:
    """The place of the line of a function that ends with a comment, as an error names it."""
    lines, first = source.getsourcelines(function)
    (line,) = [number for number, text in enumerate(lines, first) if text.rstrip().endswith(f"# {mark}")]
    return f"{__file__}:{line}"


def raised(error: type[Exception], use: Callable[[], object]) -> str:
    with pytest.raises(error) as caught:
        use()
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # it may end an actor of the script
    return str(caught.value)


def let_go(x: torch.Tensor) -> None:
    x.drop()  # type: ignore[attr-defined]  # the first drop


def test_a_dropped_tensor_says_where_whatever_uses_it(active: ProcMesh) -> None:
    x, other = torch.ones(2), torch.ones(2)
    view = x[:1]
    let_go(x)
    x.drop()  # type: ignore[attr-defined]  # a later one does nothing
    place = line_of("the first drop", let_go)
    uses: list[Callable[[], object]] = [
        lambda: x + 1,
        lambda: torch.cat([other, x]),
        lambda: x.add_(other),
        lambda: inspect(x),
        lambda: reduce(x, "gpus"),
        lambda: remote(functions.same, propagate=lambda x: x)(x),
        lambda: side.borrow(x),
        lambda: compile(lambda x: x + 1)(x),
    ]
    for use in uses:
        message = raised(DroppedTensorError, use)
        assert message.endswith(f"drop() at {place}"), message
    assert inspect(view).tolist() == [1]


def test_a_tensor_that_was_given_back_says_where(active: ProcMesh) -> None:
    x = numbers(3)
    with side.borrow(x) as y:  # this block
        part = y[1:]
    z, borrow = side.borrow(x, mutable=True)
    borrow.drop()  # this drop
    borrow.drop()
    with contextlib.ExitStack() as stack:  # this stack
        w = stack.enter_context(side.borrow(x))
    with pytest.raises(KeyError), side.borrow(x) as v:  # this failure
        {}["missing"]
    here = test_a_tensor_that_was_given_back_says_where
    for given_back, mark in (
        (y, "this block"),
        (part, "this block"),
        (z, "this drop"),
        (w, "this stack"),
        (v, "this failure"),
    ):
        how = "by drop()" if mark == "this drop" else "at the end of the block of `with`"
        for use in (lambda tensor=given_back: tensor + 1, lambda tensor=given_back: x + tensor):
            message = raised(BorrowedTensorError, use)
            assert message.endswith(f"given back {how} at {line_of(mark, here)}"), message


def test_a_replay_says_where_what_it_reads_was_dropped(active: ProcMesh) -> None:
    held, lent = numbers(3), numbers(3)
    borrow = side.borrow(lent)
    one, other = compile(lambda: held + 1), compile(lambda: borrow.tensor + 1)
    for _ in range(2):
        one()
        other()
    held.drop()  # type: ignore[attr-defined]  # held goes
    borrow.drop()  # the borrow goes
    here = test_a_replay_says_where_what_it_reads_was_dropped
    assert line_of("held goes", here) in raised(DroppedTensorError, one)
    assert line_of("the borrow goes", here) in raised(BorrowedTensorError, other)
