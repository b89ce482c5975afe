"""Programs that workers compile by `torch.compile` do what they do without it, memory and failures included."""

from typing import Any

import pytest
import torch
from torch import nn

from skipper.control import ProcMesh
from skipper.tensor_engine import CompileError, RemoteError, compile, inspect, remote
from skipper.tensor_engine.script import instruction_stream, random
from skipper.tensor_engine.script.session import session_of
from tests.tensor_engine import user_functions as functions
from tests.tensor_engine.conftest import PATIENCE_S
from tests.tensor_engine.looking import holds, numbers, same, value


def compiled_on(procs: ProcMesh, name: str) -> list[int]:
    """How many operations the compiled regions of a program have, on the last worker."""
    session = session_of(procs)
    session.synchronize(PATIENCE_S)
    worker = session.workers(instruction_stream.MAIN).slice(**{axis: size - 1 for axis, size in procs.extent.items()})
    found: list[int] = worker.ask.call_one("tests.tensor_engine.on_workers:compiled_regions", 0, name).get(PATIENCE_S)
    return found


def everything(x: Any, held: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * 0.5 + 1
    view = y.t()
    y.relu_()  # of its own: a part of a region
    y[0].add_(3)
    values, indices = y.topk(2, dim=1)
    total = (y @ view).reduce("gpus", "sum")
    held.add_(total)  # from outside, as it is
    noise = torch.rand(4, 4) + total
    left, right = noise.split(2)
    left.mul_(-1)
    whole = x.view(16).sin()
    return y, view, values, indices, total, noise, left, right, x.t(), whole.view(4, 4), whole


def test_operations_give_what_they_give_uncompiled_and_share_memory_alike(active: ProcMesh) -> None:
    def run(function: Any, held: torch.Tensor) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        random.manual_seed(7)
        for shift in range(4):
            x = numbers(4, 4) + active.rank_tensor("gpus") + shift
            results = function(x, held)
            for index, result in enumerate(results):  # what shares its memory changes, and nothing else
                result.add_(index)
            found += [*results, x]
        return [*found, held]

    program = compile(everything, worker_compile="aot_eager")
    for eager, replayed in zip(run(everything, torch.zeros(4, 4)), run(program, torch.zeros(4, 4)), strict=True):
        assert eager.stride() == replayed.stride()
        same(eager, replayed)
    assert program.programs == 1
    assert len(compiled_on(active, "everything")) == 2  # before the reduction, and after the random numbers


def test_a_training_step_gives_the_losses_and_weights_of_eager_steps(active: ProcMesh) -> None:
    def train(worker_compile: str | None) -> tuple[Any, list[torch.Tensor]]:
        model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))
        with torch.no_grad():
            for index, parameter in enumerate(model.parameters()):
                parameter.copy_(numbers(*parameter.shape) / 3 + index / 10)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)

        def training(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            for parameter in model.parameters():
                parameter.grad.reduce_("gpus", "avg")  # type: ignore[union-attr]
            optimizer.step()
            return loss.detach()

        step = training if worker_compile is None else compile(training, worker_compile=worker_compile)
        losses = [step(numbers(6, 4) + shift + active.rank_tensor("gpus")) for shift in range(6)]
        return step, [*losses, *model.parameters()]

    step, values = train("aot_eager")
    for eager, replayed in zip(train(None)[1], values, strict=True):
        same(eager, replayed)
    assert max(compiled_on(active, step.__qualname__)) > 10


def test_a_failure_is_that_of_the_operation_with_its_line(active: ProcMesh) -> None:
    table = torch.arange(4.0)

    @compile(worker_compile="aot_eager")
    def program(index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        fine = index + 1
        bad = table.index_select(0, index)  # the line that fails
        return fine, bad * 2, fine * 2

    good = torch.tensor([0, 1])
    for _ in range(3):
        program(good)
    fine, bad, late = program(good + active.rank_tensor("gpus") * 10)
    assert [value(each).tolist() for each in (fine, late)] == [[11, 12], [22, 24]]
    holds(bad, [0, 2], rank=0)
    with pytest.raises(RemoteError, match="index out of range") as caught:
        value(bad)
    assert "# the line that fails" in caught.value.script_stack
    assert "index_select" in caught.value.operation
    holds(program(good)[1], [0, 2])
    poisoned = torch.arange(4).index_select(0, torch.tensor([1, 7]))
    with pytest.raises(RemoteError, match="index_select"):
        value(program(poisoned)[0])
    holds(program(good)[1], [0, 2])


def test_what_a_compiler_gets_wrong_or_gives_up_is_put_right(active: ProcMesh) -> None:
    remote(functions.register_backends)()

    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.t() * 2
        z = (y + 1).contiguous()
        total = y.reduce("gpus", "sum")  # type: ignore[attr-defined]
        return y, y[1:], z, total + x, total * x

    # The second region is not compiled: its view would have memory of its own, or it has more than one input.
    for backend in ("lays_out", "gives_up"):
        replayed = compile(program, worker_compile=backend)
        for shift in range(4):
            x = (numbers(3, 5) + shift)[:, :3]
            for eager, other in zip(program(x), replayed(x), strict=True):
                assert eager.stride() == other.stride()
                same(eager, other)
                place = (2, 2), (1, 2), eager.storage_offset()
                same(eager.as_strided(*place), other.as_strided(*place))  # at the same place of its memory
        assert compiled_on(active, program.__qualname__) == [4]


def test_workers_that_cannot_compile_say_why(active: ProcMesh) -> None:
    program = compile(lambda x: x + 1, worker_compile="no_such_backend")
    for _ in range(2):
        with pytest.raises(CompileError, match=r"rank 0 cannot compile with worker_compile='no_such_backend'.*Invalid"):
            program(numbers(2))
    last = active.slice(gpus=1)
    with last.activate():
        remote(functions.use_compiler)("no-such-compiler")
        with pytest.raises(CompileError, match=r"rank 1 .*'inductor'.*No working C\+\+ compiler"):
            compile(lambda x: x + 1, worker_compile="inductor")(torch.ones(2))
        remote(functions.use_compiler)(None)
        assert inspect(torch.ones(1), timeout=PATIENCE_S).tolist() == [1]
