"""Processes that take the place of others: what is lost with them, what stays, and how it is brought back."""

import os
import pickle
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from skipper import tensor_engine
from skipper.control import Actor, ActorMesh, ProcMesh, SupervisionError, endpoint, this_host
from skipper.tensor_engine import (
    BorrowedTensorError,
    CommunicationError,
    EngineClosedError,
    MeshMismatchError,
    MisuseError,
    RemoteError,
    RespawnedError,
    RestoreError,
    Stream,
    call_on_shard_and_fetch,
    fetch_shard,
    inspect,
    process_group,
    rejoin,
    remote,
    restore,
    to_mesh,
)
from skipper.tensor_engine.script.session import session_of
from tests.tensor_engine.conftest import PATIENCE_S, Failures

ENV = {"OMP_NUM_THREADS": "1"}


@pytest.fixture
def replicas(end_the_job: None, failures: Failures) -> Iterator[ProcMesh]:
    """Three workers, some of which die in the test."""
    mesh = this_host().spawn_procs({"dp": 3}, env=ENV)
    yield mesh
    session_of(mesh).procs.stop().get(PATIENCE_S)


def process_id() -> int:
    return os.getpid()


def kill(mesh: ProcMesh, **place: int) -> None:
    """Kill the process of a rank, and wait until the script knows that it has ended."""
    with mesh.activate():
        victim = call_on_shard_and_fetch(process_id, shard=place).get(PATIENCE_S)
    ended = mesh.slice(**place).ended
    os.kill(victim, signal.SIGKILL)
    ended.get(PATIENCE_S)


def replaced(mesh: ProcMesh, *positions: int) -> ProcMesh:
    """The mesh with other processes at these positions."""
    return mesh.with_successors({position: this_host().spawn_procs(env=ENV) for position in positions})


def at(tensor: torch.Tensor, **place: int) -> Any:
    return inspect(tensor, place, timeout=PATIENCE_S).tolist()


def test_ranks_that_are_left_keep_their_values_and_those_of_the_new_one_are_poison_until_they_are_restored(
    replicas: ProcMesh,
) -> None:
    with replicas.activate():
        x, same = torch.ones(2) * replicas.rank_tensor("dp"), torch.arange(6.0).reshape(2, 3)
        turned = same.clone().t()
    kill(replicas, dp=1)
    with pytest.raises((SupervisionError, EngineClosedError)):
        inspect(x.reduce("dp"), strict=True, timeout=PATIENCE_S)
    again = replaced(replicas, 1)
    assert rejoin(again) == (1,)
    assert rejoin(again) == ()
    assert again == replicas
    assert at(x, dp=2) == [2, 2]
    with pytest.raises(RespawnedError, match=r"rank 1 was respawned") as caught:
        inspect(x + 1, dp=1, timeout=PATIENCE_S)
    assert caught.value.rank == 1
    assert pickle.loads(pickle.dumps(caught.value)).rank == 1
    with pytest.raises(RespawnedError):
        inspect(x.reduce("dp"), dp=0, timeout=PATIENCE_S)
    for mesh in (replicas, again):  # an older reference does as well
        with mesh.activate():
            fresh = (torch.ones(()) * mesh.rank_tensor("dp")).reduce("dp")
        assert at(fresh, dp=1) == 3
    restore({"same": same, "turned": [turned]}, "dp")
    assert at(same, dp=1) == [[0, 1, 2], [3, 4, 5]]
    assert at(turned @ same, dp=1) == at(turned @ same, dp=0)
    same.mul_(2)
    assert at(same, dp=1) == at(same, dp=2) == [[0, 2, 4], [6, 8, 10]]
    assert at(x.slice_mesh(dp=2).to_mesh(again), dp=1) == [2, 2]


def test_what_a_rank_has_that_is_left_is_no_others_to_overwrite_unless_a_copy_is_given(replicas: ProcMesh) -> None:
    with replicas.activate():
        x = torch.ones(2) * replicas.rank_tensor("dp")
    view = x[0]
    kill(replicas, dp=0)
    rejoin(replaced(replicas, 0))
    restore(x, "dp")
    assert [at(x, dp=rank) for rank in range(3)] == [[1, 1], [1, 1], [2, 2]]
    with pytest.raises(RespawnedError):
        inspect(view, timeout=PATIENCE_S)
    restore([x], source=[torch.tensor([5.0, 6.0])])
    assert [at(x, dp=rank) for rank in range(3)] == [[5, 6]] * 3
    assert at(view, dp=2) == 5  # there it is still a view
    restore(x, source=x.flip(0))
    assert at(x, dp=0) == [6, 5]
    for wrong in (torch.ones(3), torch.ones(2, dtype=torch.float64), [x, x]):
        with pytest.raises(MisuseError):
            restore(x, source=wrong)
    with pytest.raises(MisuseError):
        restore(x)
    with pytest.raises(KeyError):
        restore(x, "tp")


def test_what_nobody_has_any_more_comes_from_the_script_or_is_an_error(end_the_job: None, failures: Failures) -> None:
    grid = this_host().spawn_procs({"dp": 2, "tp": 2}, env=ENV)
    with grid.activate():
        x = grid.rank_tensor("dp") * 2 + grid.rank_tensor("tp")
    kill(grid, dp=0, tp=1)
    rejoin(replaced(grid, 1))
    restore(x, "dp")
    assert [at(x, dp=dp, tp=tp) for dp in range(2) for tp in range(2)] == [0, 3, 2, 3]
    both = session_of(grid).procs
    kill(both, dp=0, tp=1)
    kill(both, dp=1, tp=1)
    rejoin(replaced(both, 1, 3))
    with pytest.raises(RestoreError, match=r"ranks 1, 3 have been respawned, .* along dp") as caught:
        restore(x, "dp")
    assert caught.value.ranks == (1, 3)
    restore(x, "tp")
    assert [at(x, dp=dp, tp=tp) for dp in range(2) for tp in range(2)] == [0, 0, 2, 2]
    session_of(grid).procs.stop().get(PATIENCE_S)


def learned(mesh: ProcMesh | None, steps: int, fault: Callable[[int], None] = lambda step: None) -> list[float]:
    """The losses of training, in the script or over replicas, with a fault before gradients are reduced."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    samples, wanted = torch.randn(steps, 6, 4), torch.randn(steps, 6, 2)
    model = model if mesh is None else mesh.place(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    losses: list[float] = []
    while len(losses) < steps:
        step = len(losses)
        x, y = samples[step], wanted[step]
        if mesh is not None:
            with mesh.activate():
                mine = mesh.rank_tensor("dp").view(1)
                x, y = (to_mesh(each.view(3, 2, -1), mesh).index_select(0, mine).squeeze(0) for each in (x, y))
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        if mesh is None:
            losses.append(loss.item())
        else:
            fault(step)
            try:  # what is issued may be refused already
                total = loss.detach().reduce("dp", "avg")  # type: ignore[attr-defined]
                for parameter in model.parameters():
                    total = total + 0 * parameter.grad.reduce_("dp", "avg").sum()  # type: ignore[union-attr]
                losses.append(inspect(total, strict=True, timeout=PATIENCE_S).item())
            except (RemoteError, SupervisionError, EngineClosedError):
                mesh = replaced(session_of(mesh).procs, 1)
                assert rejoin(mesh) == (1,)
                restore([model, optimizer], "dp")
                continue
        optimizer.step()
    return losses


def test_training_goes_on_with_the_losses_of_a_run_to_which_nothing_happened(replicas: ProcMesh) -> None:
    left = [2, 4]

    def fault(step: int) -> None:
        if step in left:
            left.remove(step)
            kill(session_of(replicas).procs, dp=1)

    assert learned(replicas, 6, fault) == pytest.approx(learned(None, 6), rel=1e-5)
    assert left == []


def largest(x: torch.Tensor, group: Any) -> torch.Tensor:
    torch.distributed.all_reduce(x, torch.distributed.ReduceOp.MAX, group=group)
    return x


def test_compiled_functions_are_traced_anew_and_process_groups_are_made_anew(replicas: ProcMesh) -> None:
    @tensor_engine.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        return x.reduce("dp") * 2  # type: ignore[attr-defined,no-any-return]

    take = remote(largest, propagate=lambda x, group: x)
    group = process_group(replicas, "dp")
    with replicas.activate():
        x = torch.ones(2) * replicas.rank_tensor("dp")
    assert at(step(x), dp=1) == [6, 6]
    assert at(take(x.clone(), group), dp=0) == [2, 2]
    kill(replicas, dp=2)
    again = replaced(replicas, 2)
    rejoin(again)
    with again.activate():
        y = torch.ones(2) * again.rank_tensor("dp")
    assert [at(each, dp=1) for each in (step(y), step(y))] == [[6, 6]] * 2
    assert step.programs == 2
    with pytest.raises(MeshMismatchError, match="rejoin"):
        take(y.clone(), group)
    assert at(take(y.clone(), process_group(again, "dp")), dp=0) == [2, 2]


class Scaled(Actor):
    def __init__(self, factor: int) -> None:
        self.factor = factor

    @endpoint(propagate=lambda x: x)
    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def test_actors_that_are_made_anew_in_the_new_process_take_tensors(replicas: ProcMesh) -> None:
    actors: ActorMesh[Any] = replicas.spawn("scaled", Scaled, 2)
    with replicas.activate():
        x = torch.ones(2)
    assert at(actors.scale.rref(x), dp=1) == [2, 2]
    kill(replicas, dp=1)
    again = replaced(replicas, 1)
    rejoin(again)
    restore(x, "dp")
    with pytest.raises(MeshMismatchError):
        actors.scale.rref(x)
    actors = actors.with_successors(again, 3)
    scaled = actors.scale.rref(x)
    assert [at(scaled, dp=rank) for rank in range(3)] == [[2, 2], [3, 3], [2, 2]]
    assert actors.slice(dp=1).scale.call_one(x).get(PATIENCE_S).tolist() == [3, 3]


def test_streams_go_on_and_a_tensor_that_is_lent_is_given_back_first(replicas: ProcMesh) -> None:
    side = Stream("side")
    with replicas.activate():
        x = torch.ones(2) * 3
        with side.activate():
            y = torch.ones(2)
    with side.borrow(x) as lent:
        assert at(y + lent, dp=1) == [4, 4]
        kill(replicas, dp=1)
        again = replaced(replicas, 1)
        with pytest.raises(BorrowedTensorError):
            rejoin(again)
    rejoin(again)
    with pytest.raises(RespawnedError):
        inspect(y, dp=1, timeout=PATIENCE_S)
    restore([x, y], "dp")
    with side.borrow(x) as lent:
        assert at((y + lent).reduce("dp"), dp=1) == [12, 12]


def test_a_rank_that_is_given_away_while_others_wait_for_it_is_no_failure_that_anybody_has_to_see(
    replicas: ProcMesh, caplog: pytest.LogCaptureFixture
) -> None:
    with replicas.activate():
        x = torch.ones(2)
        first = x.reduce("dp")
    inspect(first, strict=True, timeout=PATIENCE_S)
    kill(replicas, dp=1)

    def reduce_thrice() -> None:
        sums = [x.reduce("dp") for _ in range(3)]
        fetch_shard(sums[0], dp=0).get(PATIENCE_S)

    with pytest.raises((RemoteError, EngineClosedError)) as caught:  # the loss of the rank may be known before
        reduce_thrice()
    assert isinstance(caught.value, EngineClosedError) or CommunicationError.__name__ in str(caught.value)
    rejoin(replaced(replicas, 1))
    restore(x, "dp")
    assert at(x.reduce("dp"), dp=1) == [3, 3]
    session_of(replicas).close(PATIENCE_S)
    assert [record for record in caplog.records if record.name == "skipper.tensor_engine"] == []
