"""Streams and what they lend each other, against the same operations in one process."""

import itertools

import pytest
import torch

from skipper.control import ProcMesh
from skipper.tensor_engine import (
    BorrowedTensorError,
    LocalTensorError,
    RemoteError,
    Stream,
    StreamMismatchError,
    Tensor,
    get_active_stream,
    inspect,
    remote,
)
from skipper.tensor_engine.script.streams import main
from tests.tensor_engine import user_functions as functions
from tests.tensor_engine.conftest import PATIENCE_S, values_on

side = Stream("side")
third = Stream("third")
names = (f"event {number}" for number in itertools.count())


def at(tensor: torch.Tensor) -> list[object]:
    return [inspect(tensor, gpus=rank, timeout=PATIENCE_S).tolist() for rank in range(2)]


def ranked(procs: ProcMesh) -> Tensor:
    with procs.activate():
        result = torch.ones(3) * (procs.rank_tensor("gpus") + 1)
    assert isinstance(result, Tensor)
    return result


def on(stream: Stream, procs: ProcMesh) -> Tensor:
    with stream.activate():
        return ranked(procs)


def test_tensors_belong_to_the_stream_on_which_they_are_made(procs: ProcMesh) -> None:
    assert get_active_stream() is main
    with procs.activate(), side.activate():
        x = torch.ones(3) + procs.rank_tensor("gpus")
        y = torch.tensor([1.0, 2.0, 3.0])
        with procs.slice(gpus=1).activate():
            assert torch.zeros(2).stream is side  # type: ignore[attr-defined]
        with third.activate():
            assert get_active_stream() is third
        assert get_active_stream() is side
    z = x * y
    assert isinstance(z, Tensor)
    assert (x.stream, z.stream, ranked(procs).stream) == (side, side, main)  # type: ignore[attr-defined]
    assert at(z) == [[1, 2, 3], [2, 4, 6]]
    with side.activate(), procs.activate():
        assert torch.ones(1).stream is side  # type: ignore[attr-defined]
    assert (repr(side), side.name) == ("<stream 'side'>", "side")


def test_streams_run_beside_each_other(procs: ProcMesh) -> None:
    first, second = next(names), next(names)
    x, y = ranked(procs), on(side, procs)
    wait = remote(functions.wait_for, propagate=lambda name, x: x)
    send = remote(functions.set_event, propagate=lambda name, x: x)
    waited = wait(first, x)  # main waits for side, which waits for main: only both together come to the end
    answered = wait(second, send(first, y))
    sent = send(second, waited)
    assert at(answered) == at(sent) == [[1] * 3, [2] * 3]


def test_collectives_run_beside_each_other(procs: ProcMesh) -> None:
    name = next(names)
    x, y = ranked(procs), on(side, procs)
    held = remote(functions.wait_for, propagate=lambda name, x: x)(name, x).reduce("gpus")
    sums = [(y * n).reduce("gpus") for n in range(5)]
    assert [at(total) for total in sums] == [[[3 * n] * 3] * 2 for n in range(5)]  # while main is held up
    remote(functions.set_event)(name, y)
    assert at(held) == [[3] * 3] * 2


def test_a_tensor_can_be_read_on_both_streams_while_it_is_lent(procs: ProcMesh) -> None:
    x = ranked(procs)
    with side.borrow(x) as y:
        assert y.stream is side
        doubled, tripled = y * 2, x * 3
        for changing in (lambda: x.add_(1), lambda: y.add_(1), lambda: y[1:].zero_(), lambda: x.reduce_("gpus")):
            with pytest.raises(BorrowedTensorError, match="to be read"):
                changing()
        with pytest.raises(StreamMismatchError, match="borrow one"):
            x + y
        with third.borrow(x) as other:
            quadrupled = other * 4
        with pytest.raises(BorrowedTensorError, match="to be read"):
            x.add_(1)
    x.add_(1)
    assert [at(each) for each in (doubled, tripled, quadrupled, x)] == [
        [[2] * 3, [4] * 3],
        [[3] * 3, [6] * 3],
        [[4] * 3, [8] * 3],
        [[2] * 3, [3] * 3],
    ]
    with pytest.raises(BorrowedTensorError, match="given back"):
        y + 1
    with pytest.raises(BorrowedTensorError, match="given back"):
        inspect(y)


def test_what_a_borrower_changes_is_changed_for_the_owner(procs: ProcMesh) -> None:
    x = ranked(procs)
    part = x[1:]
    y, borrow = side.borrow(x, mutable=True)
    for use in (lambda: x + 1, lambda: part.sum(), lambda: inspect(x), lambda: third.borrow(part)):
        with pytest.raises(BorrowedTensorError, match=r"after borrow\.drop"):
            use()
    y.mul_(10)
    view = y[:1]
    view.add_(1)
    borrow.drop()
    borrow.drop()
    part.add_(0.5)
    assert at(x) == [[11, 10.5, 10.5], [21, 20.5, 20.5]]
    with pytest.raises(BorrowedTensorError, match="given back"):
        view + 1


def test_the_order_is_kept_whichever_stream_is_late(procs: ProcMesh) -> None:
    wait = remote(functions.wait_for, propagate=lambda name, x: x)
    send = remote(functions.set_event)
    names_of = [next(names) for _ in range(2)]
    x = wait(names_of[0], ranked(procs))  # the owner is late
    with side.borrow(x, mutable=True) as y:
        y.copy_(wait(names_of[1], y * 7))  # then the borrower is
    result = x + 1
    for name in names_of:
        send(name, on(third, procs))
    assert at(result) == [[8] * 3, [15] * 3]


def test_long_chains_of_borrows_end(procs: ProcMesh) -> None:
    x = ranked(procs)
    before = values_on(procs)
    for _ in range(200):
        with side.borrow(x, mutable=True) as y, third.borrow(y, mutable=True) as z:
            z.add_(1)
        x.add_(1)
    assert at(x) == [[401] * 3, [402] * 3]
    del y, z
    assert values_on(procs) == before


def test_a_borrow_that_was_lent_on_cannot_end_first(procs: ProcMesh) -> None:
    x = ranked(procs)
    outer = side.borrow(x)
    inner = third.borrow(outer.tensor)
    with pytest.raises(BorrowedTensorError, match="has itself lent"):
        outer.drop()
    with pytest.raises(BorrowedTensorError, match="to be read"):
        third.borrow(outer.tensor, mutable=True)
    inner.drop()
    with pytest.raises(BorrowedTensorError, match="to be read"):
        outer.tensor.add_(1)  # still
    outer.drop()
    x.add_(1)


def test_failures_cross_streams_with_the_tensor(procs: ProcMesh) -> None:
    with procs.activate():
        bad = torch.arange(3.0)[torch.tensor([5])]  # this line is to blame
        x = torch.ones(3)
    with side.borrow(bad) as y:
        after = y + 1
    with side.borrow(x, mutable=True) as z:
        remote(functions.fail_after_change, propagate=lambda x, y: y)(z, z)
    for poisoned, text in ((after, "out of bounds"), (x, "told to fail"), (x + 1, "told to fail")):
        with pytest.raises(RemoteError, match=text):
            inspect(poisoned, timeout=PATIENCE_S)
    with pytest.raises(RemoteError) as caught:
        inspect(after)
    assert "this line is to blame" in caught.value.script_stack


def test_gradients_go_back_to_the_lender(procs: ProcMesh) -> None:
    x = ranked(procs).requires_grad_()
    weight = on(side, procs).requires_grad_()
    y = x.sin()
    with side.borrow(y) as lent:
        assert lent.requires_grad
        (lent.square() * weight).sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    assert (x.grad.stream, weight.grad.stream) == (main, side)  # type: ignore[attr-defined]
    for rank in range(2):
        a = torch.full((3,), rank + 1.0, requires_grad=True)
        b = a.detach().clone().requires_grad_()
        (a.sin().square() * b).sum().backward()
        torch.testing.assert_close(inspect(x.grad, gpus=rank), a.grad)
        torch.testing.assert_close(inspect(weight.grad, gpus=rank), b.grad)
    with pytest.raises(RuntimeError, match="autograd"):
        side.borrow(x, mutable=True)


def test_misuse_is_refused_at_the_line(procs: ProcMesh) -> None:
    x, y = ranked(procs), on(side, procs)
    with pytest.raises(StreamMismatchError, match="'main' and 'side'"):
        torch.cat([x, y])
    with pytest.raises(StreamMismatchError, match="borrow one"):
        remote(functions.same)((x, y))
    with pytest.raises(StreamMismatchError, match="already"):
        side.borrow(y)
    with pytest.raises(LocalTensorError):
        side.borrow(torch.ones(2))
    with side.borrow(x), pytest.raises(BorrowedTensorError, match="to be read"):
        third.borrow(x, mutable=True)
    forgotten = [side.borrow(x)]
    with pytest.warns(ResourceWarning, match="never given back"):
        forgotten.clear()
