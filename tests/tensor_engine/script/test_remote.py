"""Remote functions: arguments, results, state, process groups and failures, against the same functions called here."""

from typing import Any

import pytest
import torch

from skipper.control import Actor, ProcMesh, endpoint
from skipper.tensor_engine import (
    DroppedTensorError,
    LocalTensorError,
    MeshMismatchError,
    NoActiveMeshError,
    NotPropagatableError,
    OpaqueRef,
    RemoteError,
    Tensor,
    call_on_shard_and_fetch,
    inspect,
    process_group,
    remote,
)
from tests.tensor_engine import user_functions as functions
from tests.tensor_engine.conftest import PATIENCE_S, values_on


class Gauge(Actor):
    @endpoint
    def read(self) -> int:
        return 1


HERE = "tests.tensor_engine.user_functions"


def ranked(procs: ProcMesh, *shape: int) -> torch.Tensor:
    with procs.activate():
        return torch.arange(float(torch.Size(shape).numel())).reshape(shape) * (procs.rank_tensor("gpus") + 1)


def at(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [inspect(tensor, gpus=rank, timeout=PATIENCE_S) for rank in range(2)]


@pytest.mark.parametrize("propagate", ["cached", "mocked", "inspect", lambda b, *r, **k: functions.nested(b, *r, **k)])
def test_tensors_may_be_anywhere_in_arguments_and_results(procs: ProcMesh, propagate: Any) -> None:
    x, y = ranked(procs, 2, 3), ranked(procs, 3)
    function = remote(functions.nested, propagate=propagate)
    for label in ("a", "a", "b"):
        result = function({"first": x, "more": (y, label)}, x, "other", scale=0.5)
        assert (result["label"], result["count"]) == (label.upper(), 2)
        for rank, (a, b) in enumerate(zip(at(x), at(y), strict=True)):
            local = functions.nested({"first": a, "more": (b, label)}, a, "other", scale=0.5)
            torch.testing.assert_close(inspect(result["sum"][0], gpus=rank), local["sum"][0])
            torch.testing.assert_close(inspect(result["sum"][1][0], gpus=rank), local["sum"][1][0])


def test_state_is_that_of_the_module_on_each_worker_however_the_function_is_named(procs: ProcMesh) -> None:
    with procs.activate():
        remote(functions.reset)()
        x = torch.zeros(2)
    results = [
        remote(functions.count_calls, propagate="mocked")(x),
        remote(f"{HERE}.count_calls", propagate=lambda x: x)(x),
        functions.decorated(x),
        functions.decorated.rref(x),
        remote(functions.decorated, propagate="cached")(x),
    ]
    for count, result in enumerate(results, start=1):
        assert [each.tolist() for each in at(result)] == [[count, count]] * 2
    with procs.activate():
        assert call_on_shard_and_fetch(functions.calls_so_far, shard={"gpus": 1}).get(PATIENCE_S) == 5
    assert isinstance(functions.decorated, type(remote(functions.same)))


def test_remote_functions_may_call_each_other_on_the_worker(procs: ProcMesh) -> None:
    with procs.activate():
        remote(functions.reset)()
        x = torch.zeros(2)
    assert at_rank(remote(functions.twice, propagate=lambda x: x)(x), 1) == [3, 3]


def test_a_function_of_the_script_is_sent_with_what_it_closes_over(procs: ProcMesh) -> None:
    x, factor = ranked(procs, 3), 7.0
    result = remote(lambda x: x * factor, propagate=lambda x: x)(x)
    assert [each.tolist() for each in at(result)] == [[0, 7, 14], [0, 14, 28]]


def test_torch_functions_can_be_named_by_their_path(procs: ProcMesh) -> None:
    x = ranked(procs, 3)
    for path in ("torch.nn.functional.softplus", "torch.ops.aten.softplus.default"):
        result = remote(path, propagate="cached")(x)
        for found, local in zip(at(result), at(x), strict=True):
            torch.testing.assert_close(found, torch.nn.functional.softplus(local))


def test_results_that_share_memory_with_arguments_do_so_for_the_script_too(procs: ProcMesh) -> None:
    x, y = ranked(procs, 3), ranked(procs, 2)
    view, same, changed = remote(functions.view_and_change, propagate="cached")(x, y)
    assert same is x
    assert changed is y
    view.mul_(10)
    assert [each.tolist() for each in at(x)] == [[0, 10, 20], [0, 20, 40]]
    assert [each.tolist() for each in at(y)] == [[1, 2], [1, 3]]


def test_a_result_that_the_script_does_not_take_for_its_argument_is_another_tensor(procs: ProcMesh) -> None:
    x = ranked(procs, 3)
    result = remote(functions.same, propagate=torch.empty_like)(x)
    x.zero_()
    assert [each.tolist() for each in at(result)] == [[0, 1, 2], [0, 2, 4]]


def test_without_propagate_a_function_runs_for_its_effect(procs: ProcMesh) -> None:
    x = ranked(procs, 3)
    assert remote(lambda x: x.add_(1))(x) is None
    assert [each.tolist() for each in at(x)] == [[1, 2, 3], [1, 3, 5]]


def test_shapes_that_depend_on_values_are_asked_for(procs: ProcMesh) -> None:
    with procs.activate():
        x = torch.tensor([3.0, -1.0, 2.0])
    result = remote(functions.positive, propagate="inspect")(x)
    assert isinstance(result, Tensor)
    assert [each.tolist() for each in at(result * 2)] == [[6, 4]] * 2
    with pytest.raises(NotPropagatableError, match='propagate="inspect"'):
        remote(functions.positive, propagate="cached")(x)
    uneven = remote(functions.positive, propagate="inspect")(x + 2 * procs.rank_tensor("gpus"))
    assert at_rank(uneven, 0) == [3, 2]
    with pytest.raises(RemoteError, match=r"the script expects float32\[2\].*float32\[3\] was returned"):
        at_rank(uneven, 1)


def at_rank(tensor: torch.Tensor, rank: int) -> Any:
    return inspect(tensor, gpus=rank, timeout=PATIENCE_S).tolist()


def test_a_function_can_be_called_on_one_rank_and_its_result_fetched(procs: ProcMesh) -> None:
    x = ranked(procs, 3)
    x.add_(1)
    futures = [call_on_shard_and_fetch(describe, x, [x], scale=2, shard={"gpus": rank}) for rank in range(2)]
    x.zero_()
    assert [future.get(PATIENCE_S)["sum"] for future in futures] == [6, 9]
    with procs.activate():
        found = call_on_shard_and_fetch(describe, x, [x], scale=2).get(PATIENCE_S)
    assert type(found["tensor"]) is torch.Tensor
    assert found["tensor"].tolist() == [0, 0, 0]
    with pytest.raises(RemoteError, match="no such key") as caught:
        call_on_shard_and_fetch(fail, x, shard={"gpus": 1}).get(PATIENCE_S)
    assert caught.value.rank == 1
    assert "call_on_shard_and_fetch(fail, x" in caught.value.script_stack
    with pytest.raises(IndexError):
        call_on_shard_and_fetch(fail, x, shard={"gpus": 2})
    with pytest.raises(KeyError, match="no axis 'tp'"):
        call_on_shard_and_fetch(fail, x, shard={"tp": 0})


def describe(x: torch.Tensor, xs: list[torch.Tensor], *, scale: float) -> dict[str, Any]:
    return {"sum": x.sum().item(), "same": xs[0] is x, "tensor": x * scale}


def fail(x: torch.Tensor) -> None:
    raise KeyError("no such key")


def test_a_failure_poisons_results_and_what_was_changed_and_nothing_else(procs: ProcMesh) -> None:
    x, y = ranked(procs, 3), ranked(procs, 3)
    part = x[:1]
    result = remote(functions.fail_after_change, propagate=lambda x, y: y)(x, y)
    later = remote(functions.same, propagate="cached")(result + 1)
    for poisoned in (result, later, x, part):
        with pytest.raises(RemoteError, match="told to fail") as caught:
            inspect(poisoned, timeout=PATIENCE_S)
        assert caught.value.operation == "fail_after_change"
        assert "propagate=lambda x, y: y)(x, y)" in caught.value.script_stack
        assert 'raise ValueError("told to fail")' in caught.value.worker_stack
    assert at_rank(y, 1) == [0, 2, 4]


def test_what_a_function_returns_is_checked(procs: ProcMesh) -> None:
    x = ranked(procs, 3)
    for propagate, text in (
        (lambda x: (x, x), "expects 2 tensors or objects, and 1 were returned"),
        (lambda x: x[:2], r"expects float32\[2\] on cpu, and float32\[3\] was returned"),
        (lambda x: x.long(), r"expects int64\[3\] on cpu, and float32\[3\] was returned"),
        (lambda x: OpaqueRef(), "expects a reference to an object"),
    ):
        result = remote(lambda x: x + 0, propagate=propagate)(x)
        if isinstance(result, OpaqueRef):
            result = remote(functions.length, propagate=lambda ref: torch.empty(()))(result)
        with pytest.raises(RemoteError, match=text):
            inspect(result[0] if isinstance(result, tuple) else result, timeout=PATIENCE_S)


def test_objects_stay_on_the_workers_and_go_with_the_last_reference(procs: ProcMesh) -> None:
    before = values_on(procs)
    x = ranked(procs, 3)
    kept = remote(functions.make_list, propagate=lambda x: OpaqueRef())(x)
    assert isinstance(kept, OpaqueRef)
    remote(functions.append)(kept, x * 10)
    total = remote(functions.total, propagate=lambda kept: torch.empty(3))(kept)
    assert [each.tolist() for each in at(total)] == [[0, 11, 22], [0, 22, 44]]
    assert call_on_shard_and_fetch(functions.length, kept, shard={"gpus": 1}).get(PATIENCE_S) == 2
    with pytest.raises(LocalTensorError, match="on the workers"):
        _ = kept.value
    with pytest.raises(LocalTensorError, match="on the workers"):
        remote(functions.length, propagate="cached")(kept)
    del x, kept, total
    assert values_on(procs) == before


def test_process_groups_are_those_of_torch(four: ProcMesh, procs: ProcMesh) -> None:
    with four.activate():
        x = torch.ones(2) * (2 * four.rank_tensor("dp") + four.rank_tensor("tp") + 1)
    tp, both = process_group(four, "tp"), process_group(four)
    add = remote(functions.sum_over, propagate="cached")
    sums = [add(x, tp), add(x, process_group(four, "dp")), add(x, group=both), add(x, tp)]
    last = remote(functions.broadcast, propagate="mocked")(x, {"all": both})
    expected = [[3, 3, 7, 7], [4, 6, 4, 6], [10] * 4, [3, 3, 7, 7], [4] * 4]
    for total, wanted in zip([*sums, last], expected, strict=True):
        assert [inspect(total, dict(p), timeout=PATIENCE_S)[0].item() for p in four.extent.points()] == wanted
    alone = process_group(four.slice(dp=1, tp=0))
    with four.slice(dp=1, tp=0).activate():
        assert call_on_shard_and_fetch(functions.members, alone).get(PATIENCE_S) == (0, 1)
    with four.activate(), pytest.raises(MeshMismatchError, match="have to take part"):
        call_on_shard_and_fetch(functions.members, tp, shard={"dp": 0})
    with procs.activate(), pytest.raises(MeshMismatchError, match="have to take part"):
        remote(functions.members)(tp)
    with pytest.raises(KeyError, match="no axis 'gpus'"):
        process_group(four, "gpus")


def test_a_rank_that_cannot_take_part_in_a_process_group_lets_nobody_wait(procs: ProcMesh) -> None:
    x = ranked(procs, 2)
    group = process_group(procs, "gpus")
    add = remote(functions.sum_over, propagate="cached")
    assert at_rank(add(x, group), 0) == [0, 3]
    only_one = remote(fail_on_second, propagate=lambda x, rank: x)(x, procs.rank_tensor("gpus"))
    total = add(only_one, group)
    with pytest.raises(RemoteError, match="second rank"):
        at_rank(total, 1)
    with pytest.raises(RemoteError):
        at_rank(total, 0)
    with pytest.raises(RemoteError, match="make a new one"):
        at_rank(add(x, group), 1)
    assert at_rank(add(x, process_group(procs, "gpus")), 0) == [0, 3]


def fail_on_second(x: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
    if rank == 1:
        raise ValueError("the second rank cannot")
    return x.clone()


def test_misuse_is_refused_at_the_line(procs: ProcMesh, four: ProcMesh) -> None:
    x = ranked(procs, 2)
    same = remote(functions.same, propagate="cached")
    with pytest.raises(LocalTensorError, match="tensor of the script"):
        same([torch.ones(2)])
    with four.activate():
        other = torch.ones(2)
    with pytest.raises(MeshMismatchError, match="to_mesh"):
        same((x, other))
    with pytest.raises(NoActiveMeshError, match="reset"):
        remote(functions.reset)()
    with pytest.raises(TypeError, match="cannot be pickled"):
        remote(functions.same)(x, (0 for _ in range(2)))
    dropped = ranked(procs, 2)
    dropped.drop()  # type: ignore[attr-defined]
    with pytest.raises(DroppedTensorError):
        same(dropped)
    for wrong in ("no_module", "not a path", 5):
        with pytest.raises(TypeError):
            remote(wrong)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"<endpoint gauges\.read>"):  # it has `rref` for that
        remote(procs.spawn("gauges", Gauge).read)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="propagate"):
        remote(functions.same, propagate="guess")  # type: ignore[call-overload]
    missing = remote(f"{HERE}.missing", propagate=lambda x: x)(x)
    with pytest.raises(RemoteError, match="AttributeError"):
        at_rank(missing, 0)
