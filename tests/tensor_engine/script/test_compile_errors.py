"""What a compiled function cannot do, it refuses; what fails in a replay is poison as in eager calls."""

import contextlib
from collections.abc import Callable

import pytest
import torch

from skipper.control import ProcMesh
from skipper.tensor_engine import (
    CompileError,
    DroppedTensorError,
    LocalTensorError,
    RemoteError,
    compile,
    inspect,
    to_mesh,
)
from tests.tensor_engine.conftest import PATIENCE_S
from tests.tensor_engine.looking import holds, numbers, same, value


def test_an_error_in_a_replay_poisons_what_depends_on_it_and_names_both_lines(active: ProcMesh) -> None:
    table = torch.arange(4.0)
    written = torch.zeros(2)

    @compile
    def program(index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        fine = index + 1
        bad = table.index_select(0, index)  # the line that fails
        other = bad * 2
        written.copy_(fine)
        return fine, other, other.reduce("gpus", "sum"), fine * 2  # type: ignore[attr-defined]

    good = torch.tensor([0, 1])
    for _ in range(3):  # traced, step by step, written out
        program(good)
    rank = active.rank_tensor("gpus")
    for attempt in range(2):
        fine, other, total, late = program(good + rank * 10)  # fails on rank 1 alone
        for tensor in (fine, late, written):
            value(tensor, rank=1)
        holds(other, [0, 2], rank=0)
        for tensor, place in ((other, 1), (total, 0), (total, 1)):
            with pytest.raises(RemoteError) as caught:
                inspect(tensor, gpus=place, timeout=PATIENCE_S)
            assert caught.value.rank == 1
            assert "fine, other, total, late = program(good" in caught.value.script_stack, attempt
            assert "# the line that fails" in caught.value.script_stack
            assert "index_select" in caught.value.operation
        holds(program(good)[1], [0, 2])


def test_a_program_whose_first_replay_fails_is_none_the_worse(active: ProcMesh) -> None:
    table = torch.arange(6.0).reshape(3, 2)

    @compile
    def program(index: torch.Tensor) -> torch.Tensor:
        return table.index_select(0, index).t().contiguous() * 2

    good = torch.tensor([0, 2])
    program(good)
    for _ in range(2):
        with pytest.raises(RemoteError, match="index_select"):
            value(program(good + 5))
    for _ in range(3):
        assert value(program(good)).tolist() == [[0, 8], [2, 10]]


def test_poison_that_goes_in_comes_out_of_what_depends_on_it(active: ProcMesh) -> None:
    state = torch.zeros(2)

    @compile
    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state.add_(x)
        total = torch.ones(2)
        total.reduce_("gpus", "sum")  # type: ignore[attr-defined]
        return x * 2, total * 2

    for _ in range(3):
        program(torch.ones(2))
    poisoned = torch.arange(4.0).index_select(0, torch.tensor([1, 7]))
    result, total = program(poisoned)
    holds(total, [4.0] * 2)
    for tensor in (result, state):
        with pytest.raises(RemoteError, match="index_select"):
            value(tensor)


def test_a_reduction_into_a_tensor_finds_the_poison_of_another_rank(active: ProcMesh) -> None:
    table = torch.arange(4.0)

    @compile
    def program(index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = table.index_select(0, index)
        view = chosen[:1]
        chosen.reduce_("gpus", "sum")  # type: ignore[attr-defined]
        return chosen + 1, view

    good = torch.tensor([0, 1])
    for _ in range(3):
        program(good)
    for tensor in program(good + active.rank_tensor("gpus") * 10):
        for rank in range(2):
            with pytest.raises(RemoteError, match="index_select"):
                value(tensor, rank)


def test_of_reductions_that_go_together_those_with_poison_have_it_alone(active: ProcMesh) -> None:
    table = torch.arange(4.0)

    @compile
    def program(index: torch.Tensor) -> list[torch.Tensor]:
        found = [torch.ones(2), table.index_select(0, index), torch.ones(3), table.index_select(0, index + 1)]
        for each in found:
            each.reduce_("gpus", "sum")  # type: ignore[attr-defined]
        return [each + 1 for each in found]

    good = torch.tensor([0, 1])
    for _ in range(3):
        program(good)
    first, bad, third, worse = program(good + active.rank_tensor("gpus") * 10)
    for rank in range(2):
        assert (value(first, rank).tolist(), value(third, rank).tolist()) == ([3, 3], [3, 3, 3])
        for tensor in (bad, worse):
            with pytest.raises(RemoteError, match="index_select"):
                value(tensor, rank)
    assert value(program(good)[3], 1).tolist() == [3, 5]


def drop_a_shape(x: torch.Tensor) -> torch.Tensor:
    return x.unsqueeze_(0)


def read_a_value(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


def fetch_a_value(x: torch.Tensor) -> torch.Tensor:
    inspect(x)
    return x


def choose_by_a_value(x: torch.Tensor) -> torch.Tensor:
    return x if x.sum() > 0 else -x


def swallow_the_refusal(x: torch.Tensor) -> torch.Tensor:
    with contextlib.suppress(CompileError):
        x.sum().item()
    return x


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (read_a_value, "fetch it outside|look outside"),
        (fetch_a_value, "fetch it outside"),
        (choose_by_a_value, "torch.where"),
        (swallow_the_refusal, "look outside"),
        (drop_a_shape, "shape of a tensor in place"),
    ],
)
def test_what_replays_could_not_do_is_refused_with_what_to_do(
    program: Callable[[torch.Tensor], torch.Tensor], reason: str, active: ProcMesh
) -> None:
    x = numbers(3)
    with pytest.raises(CompileError, match=reason):
        compile(program)(x)
    with pytest.raises(CompileError, match="cannot be compared"):
        compile(lambda x, options: x)(x, {1, 2})
    same(compile(lambda x: x + 1)(x), x + 1)  # the next one is none the worse


def test_state_that_is_replaced_and_not_written_is_refused(active: ProcMesh) -> None:
    class Recurrent:
        def __init__(self) -> None:
            self.state = torch.zeros(2)

        def step(self, x: torch.Tensor) -> None:
            self.state = self.state + x

    with pytest.raises(CompileError, match="copy_"):
        compile(Recurrent().step)(torch.ones(2))


def test_tensors_of_the_script_and_dropped_ones_are_refused(procs: ProcMesh) -> None:
    local = torch.ones(3)
    with procs.activate():
        held = numbers(3)
        program = compile(lambda x: x + held)
        with pytest.raises(LocalTensorError, match="to_mesh"):
            program(local)
        with pytest.raises(CompileError, match="argument"):
            compile(lambda: to_mesh(local, procs))()
        with pytest.raises(CompileError, match="happen once"):
            compile(lambda: local.add_(1))()
        program(torch.ones(3))
        held.drop()  # type: ignore[attr-defined]
        with pytest.raises(DroppedTensorError):
            program(torch.ones(3))
