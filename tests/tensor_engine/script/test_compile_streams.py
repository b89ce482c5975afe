"""Compiled functions in which streams borrow tensors of each other: replays do what the plain function does."""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from skipper.control import ProcMesh
from skipper.tensor_engine import (
    BorrowedTensorError,
    CompileError,
    RemoteError,
    Stream,
    compile,
    get_active_stream,
    inspect,
    remote,
)
from skipper.tensor_engine.script.session import session_of
from skipper.tensor_engine.script.streams import main
from tests.tensor_engine import user_functions as functions
from tests.tensor_engine.conftest import PATIENCE_S, values_on
from tests.tensor_engine.looking import holds, numbers, same, value

side = Stream("side of compiled functions")
third = Stream("third of compiled functions")
pass_gate = remote(functions.pass_gate, propagate=lambda name, x: x)
open_gate = remote(functions.open_gate)


def issued(procs: ProcMesh, stream: Stream) -> int:
    return session_of(procs).instruction_stream(procs, stream.key).issued


def test_replays_give_what_the_plain_function_gives(active: ProcMesh) -> None:
    traces = []

    def program(x: torch.Tensor, scale: float) -> tuple[torch.Tensor, ...]:
        traces.append(scale)
        x = x * scale
        with side.borrow(x) as y:
            there = y.sin() + 1
            here = x.cos()
        x.add_(1)
        with main.borrow(there) as back:
            both = here + back
        with side.borrow(x, mutable=True) as y:
            y.mul_(3)
            y[1:].sub_(1)
        return x, there, here, both, x.reduce("gpus", "sum")  # type: ignore[attr-defined]

    compiled = compile(program)
    for shift in range(5):
        x = numbers(4) + active.rank_tensor("gpus") + shift
        expected, result = program(x, 0.5), compiled(x, 0.5)
        assert [each.stream for each in result] == [main, side, main, main, main]  # type: ignore[attr-defined]
        for one, other in zip(expected, result, strict=True):
            for rank in range(2):
                assert torch.equal(value(one, rank), value(other, rank))
    assert len(traces) == 5 + 1


def test_a_replay_is_a_few_messages_whatever_the_streams_do(active: ProcMesh) -> None:
    @compile
    def program(x: torch.Tensor) -> torch.Tensor:
        for _ in range(10):
            x = x + 1
        with side.borrow(x, mutable=True) as y:
            for _ in range(10):
                y.add_(1)
        for _ in range(10):
            x = x + 1
        return x

    x = torch.zeros(2)
    program(x)
    before = issued(active, main), issued(active, side)
    result = program(x)
    assert (issued(active, main), issued(active, side)) == (before[0] + 2, before[1] + 1)
    holds(result, [30, 30])


def test_outside_tensors_and_parameters_are_lent_by_each_replay(active: ProcMesh) -> None:
    state = torch.zeros(3)
    with side.activate():
        weight = torch.ones(3)

    @compile
    def program(x: torch.Tensor) -> None:
        with get_active_stream().borrow(weight) as w:
            state.add_(x * w)
        with side.borrow(state) as s:
            weight.add_(s)

    expected, w = torch.zeros(3), torch.ones(3)
    for step in range(6):
        program(torch.ones(3) * step)
        expected = expected + step * w
        w = w + expected
    holds(state, expected.tolist())
    holds(weight, w.tolist())


@pytest.mark.parametrize("late", ["lender", "borrower"])
def test_the_order_is_kept_whichever_stream_is_late(active: ProcMesh, late: str) -> None:
    """One stream is held up in each replay until the script lets it go on, after all of it was issued."""
    with third.activate():
        signal = torch.zeros(1)
    name = f"the {late} is late"

    @compile
    def program(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        if late == "lender":
            x = pass_gate(name, x)
        with side.borrow(x, mutable=True) as y:
            y.copy_(pass_gate(name, y * 7) if late == "borrower" else y * 7)
        return x + 1

    for attempt in range(5):
        after = program(torch.ones(2) * attempt) * 2  # issued while that stream is held up
        open_gate(name, signal)
        holds(after, [2 * (7 * (attempt + 1) + 1)] * 2)
    results = [program(torch.ones(2) * number) for number in range(20)]  # all of them are held up
    for _ in results:
        open_gate(name, signal)
    for number, result in enumerate(results):
        holds(result, [7 * (number + 1) + 1] * 2)


def test_many_replays_at_once_keep_their_borrows_apart(active: ProcMesh) -> None:
    """The borrower is behind by many replays, so that several of the same borrow are under way at a time."""
    total = torch.zeros(2)

    @compile
    def program(x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        with side.borrow(x) as y, third.borrow(y) as z:
            far = z + 1
        with main.borrow(far) as back:
            total.add_(back)
        return x

    program(torch.ones(2))
    program(torch.ones(2))
    values_on(active)
    before = values_on(active)
    for number in range(300):
        program(torch.ones(2) * number)
    holds(total, [6 + sum(2.0 * number + 1 for number in range(300))] * 2)
    gc.collect()
    assert values_on(active) == before


def test_a_failure_of_one_stream_poisons_what_depends_on_it_and_the_next_replay_is_well(active: ProcMesh) -> None:
    table = torch.arange(4.0)

    @compile
    def program(index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, beside = torch.zeros(2), index + 1
        view = x[:1]
        with side.borrow(table) as there, side.borrow(index) as i, side.borrow(x, mutable=True) as y:
            y.copy_(there.index_select(0, i))  # the line that fails
            near = i * 2
            meanwhile = beside * 3
        return x, view, x + 1, near, meanwhile

    good = torch.tensor([1, 2])
    for _ in range(3):
        x, view, later, near, meanwhile = program(good)
        for tensor, expected in ((x, [1, 2]), (view, [1]), (later, [2, 3]), (near, [2, 4]), (meanwhile, [6, 9])):
            holds(tensor, expected)
    rank = active.rank_tensor("gpus")
    for _ in range(3):
        x, view, later, near, meanwhile = program(good + rank * 10)  # fails on rank 1 alone
        for tensor in (x, view, later):
            value(tensor, rank=0)
            with pytest.raises(RemoteError, match="index_select") as caught:
                value(tensor)
            assert "# the line that fails" in caught.value.script_stack
        holds(near, [22, 24])
        holds(meanwhile, [36, 39])
        holds(program(good)[2], [2, 3])


def test_a_change_that_fails_while_the_owner_is_at_work_is_not_missed(active: ProcMesh) -> None:
    """The replay of the owner is held up after it has lent the tensor, which only that replay knows by then."""
    table, name = torch.arange(4.0), "the owner is at work"
    with third.activate():
        signal = torch.zeros(1)

    @compile
    def program(index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = torch.zeros(2)
        view = x[1:]
        with side.borrow(table) as there, side.borrow(index) as i, side.borrow(x, mutable=True) as y:
            y.copy_(there.index_select(0, i))
            near = i * 2
            meanwhile = pass_gate(name, index)
        return x + 1, view, near, meanwhile

    good = torch.tensor([1, 2])
    for bad in (False, False, False, True, True, False):
        after, view, near, _ = program(good + 10 * bad)
        for rank in range(2):
            value(near, rank)
        open_gate(name, signal)
        for tensor, expected in ((after, [2, 3]), (view, [2])):
            for rank in range(2):
                if bad:
                    with pytest.raises(RemoteError, match="index_select"):
                        value(tensor, rank)
                else:
                    holds(tensor, expected, rank)


def test_what_the_owner_could_not_make_is_poison_for_the_borrower_too(active: ProcMesh) -> None:
    table = torch.arange(4.0)

    @compile
    def program(index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = table.index_select(0, index)
        with side.borrow(x) as y:
            there = y + 1
        return there, x

    good = torch.tensor([1, 2])
    for bad in (False, True, False, True, True, False):
        there, x = program(good + 10 * bad)
        for tensor, expected in ((there, [2, 3]), (x, [1, 2])):
            if bad:
                with pytest.raises(RemoteError, match="index_select"):
                    value(tensor)
            else:
                holds(tensor, expected)


def test_poison_of_a_change_goes_back_through_a_chain_of_borrows(active: ProcMesh) -> None:
    held = torch.zeros(2)
    change = remote(functions.fail_if_large, propagate=lambda x, y: y.add_(x))

    @compile
    def program(by: torch.Tensor) -> torch.Tensor:
        held.zero_()
        with side.borrow(held, mutable=True) as y, third.borrow(y, mutable=True) as z, third.borrow(by) as b:
            change(b, z)
        return held * 2

    for by in (1, 1, 1, 100):
        result = program(torch.ones(2) * by)
        if by == 1:
            holds(result, [2, 2])
    for tensor in (result, held):
        with pytest.raises(RemoteError, match="too large"):
            value(tensor)


def test_gradients_go_back_to_the_lender_in_replays(active: ProcMesh) -> None:
    here = nn.Linear(3, 4)
    with side.activate():
        there = nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*here.parameters(), *there.parameters()], lr=0.1, foreach=False)
    plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    with torch.no_grad():
        for mine, own in zip([*here.parameters(), *there.parameters()], plain.parameters(), strict=True):
            filled = numbers(*mine.shape)
            own.copy_(filled)
            if mine.stream is side:  # type: ignore[attr-defined]
                with side.borrow(filled) as lent:
                    mine.copy_(lent)
            else:
                mine.copy_(filled)

    @compile
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        hidden = here(x).tanh()
        with side.borrow(hidden) as lent:
            loss = there(lent).square().mean()
            loss.backward()
        optimizer.step()
        return loss

    own = torch.optim.SGD(plain.parameters(), lr=0.1)
    for seed in range(5):
        x = numbers(2, 3) + seed
        loss = step(x)
        own.zero_grad()
        expected = plain[1](plain[0](x).tanh()).square().mean()
        expected.backward()
        own.step()
        same(loss, expected)
    for mine, other in zip([*here.parameters(), *there.parameters()], plain.parameters(), strict=True):
        same(mine, other)
    assert step.programs == 2  # the first call finds no gradients


def test_what_is_lent_outside_is_refused_as_it_is_eagerly(active: ProcMesh) -> None:
    held = torch.zeros(2)

    @compile
    def write(x: torch.Tensor) -> None:
        with side.borrow(held, mutable=True) as y, side.borrow(x) as by:
            y.add_(by)

    @compile
    def read(x: torch.Tensor) -> torch.Tensor:
        with side.borrow(x) as y:
            return y + 1

    one = torch.ones(2)
    for _ in range(2):
        write(one)
        read(held)
    with third.borrow(held):
        with pytest.raises(BorrowedTensorError, match="to be read"):
            write(one)
        holds(read(held), [3, 3])
    with third.borrow(held, mutable=True), pytest.raises(BorrowedTensorError, match="may change it"):
        read(held)
    write(one)
    holds(held, [3, 3])


def test_autograd_learns_of_what_a_borrower_may_change(active: ProcMesh) -> None:
    weight, data = numbers(2).requires_grad_(), numbers(2)

    def change() -> None:
        with side.borrow(data, mutable=True) as y:
            y.mul_(2)

    compiled = compile(change)
    compiled()
    for each in (change, compiled):
        loss = (weight * data).sum()
        each()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()  # type: ignore[no-untyped-call]


def test_a_borrow_that_is_open_at_the_end_is_refused_and_ended(active: ProcMesh) -> None:
    held, kept = torch.zeros(2), []

    def leaves_open() -> torch.Tensor:
        y, borrow = side.borrow(held, mutable=True)  # this one stays open
        kept.append(borrow)
        return y

    def drops_it() -> None:
        kept.pop().drop()

    with pytest.raises(CompileError, match=r"open at the end.*drop\(\)") as caught:
        compile(leaves_open)()
    line = leaves_open.__code__.co_firstlineno + 1
    assert f"{__file__}:{line} " in str(caught.value)
    held.add_(1)
    with pytest.raises(BorrowedTensorError, match="given back"):
        kept[0].tensor + 1
    kept.clear()

    y, borrow = side.borrow(held)
    kept.append(borrow)
    with pytest.raises(CompileError, match="began outside"):
        compile(drops_it)()
    holds(y + 1, [2, 2])  # it has not been ended
    borrow.drop()
    holds(held.add_(1), [2, 2])


def test_a_function_that_is_refused_while_it_borrows_leaves_nothing_lent(active: ProcMesh) -> None:
    held = torch.zeros(2)

    def reads_a_value() -> float:
        y, borrow = side.borrow(held, mutable=True)
        third.borrow(y)
        found = y.sum().item()
        borrow.drop()
        return found

    with pytest.raises(CompileError, match="look outside"):
        compile(reads_a_value)()
    holds(held.add_(1), [1, 1])


def test_tensors_of_inference_mode_are_lent_as_well(active: ProcMesh) -> None:
    @compile
    def program(x: torch.Tensor) -> torch.Tensor:
        with side.borrow(x, mutable=True) as y:
            y.add_(1)
        return x * 2

    with torch.inference_mode():
        x = torch.zeros(2)
        for number in range(1, 4):
            holds(program(x), [2 * number] * 2)


def test_what_was_given_back_cannot_be_used_after_a_replay(active: ProcMesh) -> None:
    @compile
    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with side.borrow(x) as y:
            part, there = y[:1], y * 2
        return y, part, there

    before = values_on(active)
    for shift in range(4):
        y, part, there = program(numbers(3) + shift)
        for tensor in (y, part):
            with pytest.raises(BorrowedTensorError, match="given back"):
                tensor + 1
        same(there, (numbers(3) + shift) * 2)
    del y, part, there
    assert values_on(active) == before + program.programs - 1


def test_meshes_and_streams_meet_in_one_program(four: ProcMesh) -> None:
    half, rest = four.slice(dp=0), four.slice(dp=1)

    def program(x: Any) -> tuple[Any, ...]:
        first = x.slice_mesh(dp=0) * 2
        with side.borrow(first) as y:
            there = y.to_mesh(rest) + 1
            total = y.reduce("tp", "sum")
        with main.borrow(there) as back:
            second = back.to_mesh(half) + first
        with side.borrow(second, mutable=True) as z:
            z.mul_(2)
        return there, total, second, second.to_mesh(rest)

    compiled = compile(program)
    with four.activate():
        ranks = four.rank_tensor("dp") * 2 + four.rank_tensor("tp") + 1.0
        for shift in range(4):
            x = ranks.view(1) + shift
            for eager, replayed in zip(program(x), compiled(x), strict=True):
                assert (eager.mesh, eager.stream) == (replayed.mesh, replayed.stream)
                for rank in range(2):
                    found = [inspect(each, tp=rank, timeout=PATIENCE_S) for each in (eager, replayed)]
                    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert compiled.programs == 1


@pytest.mark.parametrize("make", [lambda x: x, lambda x: x.add_(0)])
def test_a_program_on_another_stream_alone_needs_no_borrow(make: Callable[[Any], Any], active: ProcMesh) -> None:
    @compile
    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with side.activate():
            there = make(torch.ones(2)) + 1
        return make(x + 0) + 1, there

    for _ in range(3):
        here, there = program(torch.ones(2))
        holds(here, [2, 2])
        holds(there, [2, 2])


def test_workers_compile_what_lies_between_the_parts_of_borrows(active: ProcMesh) -> None:
    @partial(compile, worker_compile="aot_eager")
    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x.sin() * 2 + 1
        with side.borrow(x, mutable=True) as y:
            there = (y * y + 1).cos()
            y.add_(there)
        with side.borrow(x) as y:
            later = (y + 1).exp() * 2
        return (x * 3 + 1).tanh(), there, later

    eager = program.__wrapped__
    for shift in range(4):
        x = numbers(4) + shift
        for one, other in zip(program(x), eager(x), strict=True):
            torch.testing.assert_close(value(one), value(other))
