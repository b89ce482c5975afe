"""A compiled function gives what it gives eagerly, call by call."""

import gc
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from skipper.control import ProcMesh
from skipper.tensor_engine import BorrowedTensorError, Stream, compile, inspect, remote
from skipper.tensor_engine.script import instruction_stream
from skipper.tensor_engine.script.bundles import TOGETHER
from skipper.tensor_engine.script.session import session_of
from skipper.tensor_engine.shared.program import CompiledProgram
from skipper.tensor_engine.worker.calls import FunctionCall
from tests.tensor_engine.conftest import PATIENCE_S, values_on
from tests.tensor_engine.looking import holds, numbers, same, value


def programs_on(procs: ProcMesh) -> int:
    """How many programs the first worker knows, once it has run what was issued so far."""
    gc.collect()
    session = session_of(procs)
    session.flush()
    session.synchronize(PATIENCE_S)
    worker = session.workers(instruction_stream.MAIN).slice(**dict.fromkeys(procs.extent, 0))
    count: int = worker.ask.call_one("tests.tensor_engine.on_workers:programs", 0, None).get(PATIENCE_S)
    return count


def issued(procs: ProcMesh) -> int:
    return session_of(procs).instruction_stream(procs).issued


def test_a_call_like_an_earlier_one_is_one_instruction_with_new_inputs(active: ProcMesh) -> None:
    traces = []

    @compile
    def program(x: Any, y: Any, scale: float) -> Any:
        traces.append(scale)
        for _ in range(20):
            x = (x * scale + y).sin()
        return x

    eager = program.__wrapped__
    for seed in range(4):
        x, y = numbers(3, 4) + seed, active.rank_tensor("gpus").float()
        expected = eager(x, y, 0.5)
        before = issued(active)
        result = program(x, y, 0.5)
        if seed:
            assert issued(active) == before + 1
        same(result, expected)
    assert traces == [0.5] * 5  # four eager calls and one trace


def test_a_call_of_another_kind_is_traced_anew(active: ProcMesh) -> None:
    traces: list[None] = []

    @compile
    def program(x: Any, *others: Any, **options: Any) -> Any:
        traces.append(None)
        y = x * 2
        for other in others:
            y = y + (other[0] if isinstance(other, list) else other)
        return y * options.get("scale", 1)

    x = numbers(4, 4)
    other = numbers(4, 4)
    weight = numbers(4, 4).requires_grad_()
    calls: list[Callable[[], torch.Tensor]] = [
        lambda: program(x),
        lambda: program(x[0]),  # another shape
        lambda: program(x.double()),  # another dtype
        lambda: program(x.t()),  # other strides
        lambda: program(x, other),
        lambda: program(x, x),  # the same tensor twice
        lambda: program(x, x[0]),  # shared memory
        lambda: program(x, [other]),  # another structure
        lambda: program(x, scale=2),
        lambda: program(x, scale=2.0),  # an equal number of another type
        lambda: program(x, scale=True),
        lambda: program(weight),  # requires a gradient
        lambda: torch.no_grad()(program)(weight),
    ]
    first = [call() for call in calls]
    assert len(traces) == len(calls) == program.programs
    again = [call() for call in calls]
    assert len(traces) == len(calls)
    for one, two in zip(first, again, strict=True):
        assert one.requires_grad == two.requires_grad
        assert one.stride() == two.stride()
        same(one, two)


def test_another_mesh_is_another_program(active: ProcMesh) -> None:
    @compile
    def ones() -> torch.Tensor:
        return torch.ones(2) + 1

    both = [ones() for _ in range(2)]
    with active.slice(gpus=1).activate() as part:
        one = [ones() for _ in range(2)]
    assert ones.programs == 2
    assert [each.mesh for each in (*both, *one)] == [active, active, part, part]  # type: ignore[attr-defined]
    assert inspect(one[1], timeout=PATIENCE_S).tolist() == [2, 2]


def test_results_are_new_and_share_memory_as_they_do_eagerly(active: ProcMesh) -> None:
    held, start = numbers(4), numbers(4)

    @compile
    def program(x: torch.Tensor) -> tuple[Any, ...]:
        y = x + 1
        x.mul_(2)
        return x, x[1:], {"y": y, "half": y[:2], "again": y}, held, held[2:], "name", None

    olds: list[torch.Tensor] = []
    for _ in range(3):
        x = numbers(4)
        same_x, view, named, outside, part, *plain = program(x)
        assert same_x is x
        assert outside is held
        assert named["again"] is named["y"]
        assert plain == ["name", None]
        view.fill_(7)
        named["half"].fill_(8)
        part.add_(1)
        holds(x, [2.0, 7, 7, 7])
        holds(named["y"][:2], [8, 8])
        olds.append(named["y"])
        olds[0].sub_(1)
    holds(held[2:] - start[2:], [3, 3])
    holds(olds[0][:2], [5, 5])


def test_what_a_function_leaves_behind_is_overwritten_and_usable(active: ProcMesh) -> None:
    class Model:
        last: torch.Tensor

        @compile
        def run(self, x: torch.Tensor) -> torch.Tensor:
            self.last = x * 2
            return self.last + 1

    model = Model()
    for shift in range(5):
        result = model.run(numbers(3) + shift)
        same(model.last, (numbers(3) + shift) * 2)
        same(result, model.last + 1)


def test_random_numbers_are_drawn_anew_in_each_replay(active: ProcMesh) -> None:
    draw = compile(lambda: torch.rand(8))
    draws = [value(draw()) for _ in range(3)]
    assert not torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[1], draws[2])


def test_collectives_and_moves_between_meshes_are_part_of_a_program(four: ProcMesh) -> None:
    half, rest = four.slice(dp=0), four.slice(dp=1)

    def pipeline(x: Any) -> tuple[Any, ...]:
        total = x.reduce(("dp", "tp"), "sum")
        first = (total * x).slice_mesh(dp=0)
        second = (first + 1).to_mesh(rest) * 3
        parts = total.repeat(4).reduce("tp", "avg", scatter=True)
        return total, second, second.to_mesh(half).reduce("tp", "max"), parts

    compiled = compile(pipeline)
    with four.activate():
        ranks = four.rank_tensor("dp") * 2 + four.rank_tensor("tp") + 1.0
        for shift in range(4):
            x = ranks.view(1) + shift
            for eager, replayed in zip(pipeline(x), compiled(x), strict=True):
                assert eager.mesh == replayed.mesh
                for rank in range(2):
                    found = [inspect(each, tp=rank, timeout=PATIENCE_S) for each in (eager, replayed)]
                    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert compiled.programs == 1


def test_reductions_that_follow_each_other_go_together_and_give_the_same(four: ProcMesh) -> None:
    def reductions(x: Any, y: Any) -> list[Any]:
        new = [x.reduce("dp", "sum"), y.reduce("dp", "sum"), x.reduce("dp", "stack"), y.reduce("tp", "sum")]
        chained = new[0].reduce("dp", "sum")
        doubled = [x + 0, y + 0]
        for each in (*doubled, doubled[0][1:], doubled[1]):
            each.reduce_("dp", "sum")
        other = y.reduce("dp", "max", out=torch.empty_like(y))
        return [*new, chained, *doubled, other]

    compiled = compile(reductions)
    with four.activate():
        ranks = four.rank_tensor("dp") * 2 + four.rank_tensor("tp") + 1.0
        for shift in range(3):
            x, y = ranks.view(1) * torch.ones(3) + shift, (ranks.view(1) - shift) * torch.ones(20_000)
            for eager, replayed in zip(reductions(x, y), compiled(x, y), strict=True):
                for dp, tp in ((0, 0), (1, 1)):
                    found = [inspect(each, dp=dp, tp=tp, timeout=PATIENCE_S) for each in (eager, replayed)]
                    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert compiled.programs == 1
    ((_, traced),) = compiled._order
    program: CompiledProgram = pickle.loads(traced.parts[0].site.description)
    calls = [program.sites[step.site][1] for step in program.steps]
    together = [call.static for call in calls if isinstance(call, FunctionCall) and call.function == TOGETHER]
    assert [len(plans) for plans in together] == [2, 2, 2]  # new ones; in place; what shares memory with these


def test_programs_are_bounded_and_go_with_the_function(active: ProcMesh, caplog: pytest.LogCaptureFixture) -> None:
    before = values_on(active), programs_on(active)
    x = torch.ones(2)
    program = compile(lambda x, n: x * n, programs=3)
    with caplog.at_level(logging.WARNING, "skipper.tensor_engine"):
        for number in range(8):
            for _ in range(2):
                program(x, number)
    assert program.programs == 3
    assert programs_on(active) == before[1] + 3
    assert len(caplog.records) == 1
    same(program(x, 0), x * 0)  # forgotten, and traced again
    program.clear()
    same(program(x, 5), x * 5)
    del program, x
    assert programs_on(active) == before[1]
    assert values_on(active) == before[0]


def test_many_replays_leave_nothing_behind_on_either_side(active: ProcMesh) -> None:
    state = torch.zeros(4)

    @compile
    def program(x: torch.Tensor) -> torch.Tensor:
        for _ in range(12):
            x = x + 1
        state.add_(x)
        return x * 2

    x = torch.ones(4)
    program(x)
    program(x)
    before = values_on(active)
    way = session_of(active).instruction_stream(active)
    most = 0
    for _ in range(4000):
        program(x)
        most = max(most, way.remembered)
    assert most < 3000  # what is kept to explain errors is trimmed though nothing is fetched
    assert values_on(active) == before
    holds(state, [13.0 * 4002] * 4)


def test_a_compiled_function_within_another_becomes_a_part_of_it(active: ProcMesh) -> None:
    inner = compile(lambda x: x + 1)
    outer = compile(lambda x: inner(x) * 2)
    for shift in range(3):
        same(outer(numbers(3) + shift), (numbers(3) + shift + 1) * 2)
    assert (inner.programs, outer.programs) == (0, 1)


def test_compile_wants_room_for_a_program() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        compile(lambda: None, programs=0)


def test_a_program_belongs_to_the_stream_that_is_active(active: ProcMesh) -> None:
    side = Stream("side of a program")
    program = compile(lambda: torch.ones(2) + 1)
    for _ in range(3):
        assert program().stream.name == "main"  # type: ignore[attr-defined]
        with side.activate():
            there = program()
        assert there.stream.name == "side of a program"  # type: ignore[attr-defined]
    assert program.programs == 2
    assert inspect(there, timeout=PATIENCE_S).tolist() == [2, 2]


def test_what_is_lent_to_be_read_is_not_changed_by_a_replay(active: ProcMesh) -> None:
    held, side = torch.zeros(2), Stream("reader of a program")
    program = compile(lambda x: held[:1].add_(x[0]))
    program(torch.ones(2))
    program(torch.ones(2))
    borrow = side.borrow(held)
    with pytest.raises(BorrowedTensorError):
        program(torch.ones(2))
    borrow.drop()
    program(torch.ones(2))
    holds(held, [3, 0])


def test_autograd_learns_of_what_a_replay_changes(active: ProcMesh) -> None:
    weight = numbers(2).requires_grad_()

    @compile
    def change(x: torch.Tensor) -> None:
        with torch.no_grad():
            weight[:1].mul_(x[0])

    x = torch.ones(2)
    change(x)
    loss = (weight * weight).sum()
    change(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]


def changed_copy(x: torch.Tensor, by: float) -> torch.Tensor:
    y = x.clone()
    y.add_(by)
    y[0].zero_()
    return y


@pytest.mark.parametrize("propagate", ["cached", "mocked", lambda x, by: x])
def test_remote_functions_are_part_of_a_program(propagate: Any, active: ProcMesh) -> None:
    function = remote(changed_copy, propagate=propagate)
    program = compile(lambda x: function(x * 2, 3.0) + 1)
    for shift in range(4):
        x = numbers(3) + shift
        same(program(x), changed_copy(x * 2, 3.0) + 1)
    assert program.programs == 1
