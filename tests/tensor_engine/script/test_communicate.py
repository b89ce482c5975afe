"""Reductions and moves as scripts write them, against the same thing done to a list of tensors in one process."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from skipper.control import ProcMesh
from skipper.tensor_engine import LocalTensorError, MeshMismatchError, RemoteError, Tensor, fetch_shard, inspect
from skipper.tensor_engine.errors import ReductionError
from skipper.tensor_engine.script.communicate import reduce, reduce_, slice_mesh, to_mesh
from skipper.tensor_engine.script.issue import issue_call
from tests.tensor_engine.conftest import PATIENCE_S, values_on
from tests.tensor_engine.worker.test_collectives import expected_reduction

LARGE = 50_000
"""Elements that go through shared memory."""


def shards(tensor: torch.Tensor) -> list[torch.Tensor]:
    """What each rank has, in the order of the mesh."""
    assert isinstance(tensor, Tensor)
    fetched = [fetch_shard(tensor, dict(point)) for point in tensor.mesh.extent.points()]
    return [shard.get(PATIENCE_S) for shard in fetched]


def ranks(mesh: ProcMesh) -> Any:
    """Each rank's place in the order of the mesh, as a tensor of it."""
    place = 0
    for axis, size in mesh.extent.items():
        place = place * size + mesh.rank_tensor(axis)
    return place


def numbered(mesh: ProcMesh, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of a mesh that differs between ranks."""
    with mesh.activate():
        count = 1
        for size in shape:
            count *= size
        return ((torch.arange(count).reshape(shape) % 7 + 1) * (ranks(mesh) + 1) % 11).to(dtype)


def assert_shards(tensor: torch.Tensor, wanted: Sequence[torch.Tensor]) -> None:
    for found, want in zip(shards(tensor), wanted, strict=True):
        torch.testing.assert_close(found, want)


@pytest.mark.parametrize("kind", ["sum", "avg", "product", "min", "max", "band", "bor", "bxor"])
def test_reductions_over_one_axis_and_over_both(four: ProcMesh, kind: str) -> None:
    dtype = torch.int32 if kind.startswith("b") else torch.float32
    x = numbered(four, 2, 3, dtype=dtype)
    at = shards(x)
    assert_shards(x.reduce("tp", kind), [expected_reduction(kind, at[i - i % 2 : i - i % 2 + 2]) for i in range(4)])
    assert_shards(x.reduce("dp", kind), [expected_reduction(kind, at[i % 2 :: 2]) for i in range(4)])
    assert_shards(x.reduce(("dp", "tp"), kind), [expected_reduction(kind, at)] * 4)
    assert_shards(x, at)


def test_stack_and_scatter_and_all_to_all(four: ProcMesh) -> None:
    x = numbered(four, 4, 3)
    a, b, c, d = shards(x)
    pairs = [(a, b), (a, b), (c, d), (c, d)]
    assert_shards(x.reduce("tp", "stack"), [torch.stack(pair) for pair in pairs])
    assert_shards(x.reduce(("dp", "tp"), "stack"), [torch.stack((a, b, c, d))] * 4)
    assert_shards(x.reduce(("tp", "dp"), "stack"), [torch.stack((a, c, b, d))] * 4)
    halves = [slice(0, 2), slice(2, 4)] * 2
    assert_shards(
        x.reduce("tp", "sum", scatter=True), [(u + v)[part] for (u, v), part in zip(pairs, halves, strict=True)]
    )
    assert_shards(
        x.all_to_all("tp"), [torch.cat((u[part], v[part])) for (u, v), part in zip(pairs, halves, strict=True)]
    )
    assert_shards(x.all_to_all(("dp", "tp")), [torch.stack((a[i], b[i], c[i], d[i])) for i in range(4)])
    assert_shards(x.reduce(("dp", "tp"), scatter=True), [(a + b + c + d)[i : i + 1] for i in range(4)])


def test_a_reduction_onto_a_slice_is_a_tensor_of_that_slice(four: ProcMesh) -> None:
    for shape in ((2, 3), (LARGE,)):
        x = numbered(four, *shape)
        a, b, c, d = shards(x)
        second = four.slice(tp=1)
        onto = x.reduce("tp", mesh=second)
        assert onto.mesh == second
        assert_shards(onto, [a + b, c + d])
        assert_shards(x.reduce(("dp", "tp"), "stack", mesh=four.slice(dp=0, tp=0)), [torch.stack((a, b, c, d))])
        assert_shards(
            x.reduce("dp", "max", mesh=four.slice(dp=0)) + 1, [torch.maximum(a, c) + 1, torch.maximum(b, d) + 1]
        )


def test_results_can_be_written_into_tensors_and_views(four: ProcMesh) -> None:
    x = numbered(four, 2, 3)
    a, b, c, d = shards(x)
    with four.activate():
        out = torch.zeros(3, 2, 3)
        sums = torch.empty(2, 3)
    assert x.reduce("tp", out=out[1]) is not None
    assert_shards(out.sum(0), [a + b, a + b, c + d, c + d])
    assert x.reduce("dp", "avg", out=sums) is sums
    assert_shards(sums, [(a + c) / 2, (b + d) / 2] * 2)
    column = x[:, 1]
    assert column.reduce_("dp") is column
    summed = [u.clone() for u in (a, b, c, d)]
    for mine, other in (0, c), (1, d), (2, a), (3, b):
        summed[mine][:, 1] += other[:, 1]
    assert_shards(x, summed)


def test_autograd_notices_that_a_reduction_has_changed_what_it_kept(four: ProcMesh) -> None:
    x, y = numbered(four, 3), numbered(four, 3).requires_grad_()
    product = (x * y).sum()
    x.reduce_("tp")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    again = (x * y).sum()
    y.detach().reduce("tp", out=x[:])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        again.backward()


def test_a_tensor_moves_to_processes_of_another_mesh(four: ProcMesh, procs: ProcMesh) -> None:
    for shape in ((), (3, 2), (LARGE,), (0, 2)):
        x = numbered(four, *shape)
        a, b, c, d = shards(x)
        there = x.slice_mesh(dp=1).to_mesh(procs.rename(gpus="tp"))
        assert there.mesh == procs.rename(gpus="tp")
        assert_shards(there, [c, d])
        assert_shards(there.to_mesh(four), [c, d, c, d])  # and along an axis that only the other has, all get the same
        assert_shards(x.slice_mesh(dp=0, tp=1).to_mesh(procs), [b, b])
        assert_shards(x.slice_mesh(tp=0).to_mesh(procs.rename(gpus="dp")) * 2, [a * 2, c * 2])


def test_a_tensor_moves_within_its_mesh_where_senders_may_get_something_too(four: ProcMesh) -> None:
    for shape in ((3,), (LARGE,)):
        x = numbered(four, *shape)
        a, b, c, d = shards(x)
        assert_shards(x.slice_mesh(dp=0).to_mesh(four.slice(dp=1)), [a, b])
        assert_shards(x.slice_mesh(tp=1).to_mesh(four), [b, b, d, d])
        assert_shards(x.slice_mesh(dp=1, tp=0).to_mesh(four), [c] * 4)
        transposed = four.flatten("i").split(i={"tp": 2, "dp": 2})
        swapped = x.to_mesh(transposed)  # the middle two swap what they have
        assert_shards(swapped, [a, c, b, d])
        x.add_(1)
        assert_shards(swapped, [a, c, b, d])


def test_a_tensor_of_the_script_goes_to_all_ranks(procs: ProcMesh) -> None:
    here = torch.arange(6).reshape(2, 3).t()
    there = to_mesh(here, procs)
    assert_shards(there, [here, here])


def test_a_part_of_a_mesh_shares_memory_with_the_whole(four: ProcMesh) -> None:
    x = numbered(four, 3)
    a, b, c, d = shards(x)
    part = slice_mesh(x, tp=1)
    part.mul_(10)
    assert_shards(x, [a, b * 10, c, d * 10])
    del x
    assert_shards(part, [b * 10, d * 10])  # and goes on when the whole is gone


def test_under_another_active_mesh_everything_happens_where_the_tensor_is(four: ProcMesh, procs: ProcMesh) -> None:
    x = numbered(four, 3)
    with procs.activate():
        total = x.reduce(("dp", "tp"))
        moved = x.slice_mesh(dp=0, tp=0).to_mesh(procs) + torch.ones(3)
    assert_shards(total, [sum(shards(x))] * 4)  # type: ignore[list-item]
    assert_shards(moved, [shards(x)[0] + 1] * 2)


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (lambda x, four, procs: x.reduce("gpus"), KeyError, "no axis 'gpus'"),
        (lambda x, four, procs: x.reduce(()), ValueError, "no axis of .* is named"),
        (lambda x, four, procs: x.reduce(("tp", "tp")), ValueError, "named twice"),
        (lambda x, four, procs: x.reduce("tp", "mean"), ValueError, "no reduction 'mean'"),
        (lambda x, four, procs: x.reduce("tp", "bor"), ReductionError, "integers and bools"),
        (lambda x, four, procs: (x > 0).reduce_("tp"), ReductionError, "bor"),
        (lambda x, four, procs: x.reduce("tp", scatter=True), ValueError, "does not go evenly"),
        (lambda x, four, procs: x.sum().all_to_all("tp"), ValueError, "does not go evenly"),
        (lambda x, four, procs: x.reduce("tp", mesh=procs), MeshMismatchError, "slice of the tensor's mesh"),
        (lambda x, four, procs: x.reduce("tp", mesh=four.slice(tp=0), out=x), ValueError, "cannot be combined"),
        (lambda x, four, procs: x.reduce("tp", out=x.sum(0)), ValueError, "cannot be written"),
        (lambda x, four, procs: x.reduce("tp", out=x.slice_mesh(tp=0)), MeshMismatchError, "out="),
        (lambda x, four, procs: x.reduce("tp", out=torch.ones(3, 3)), LocalTensorError, "of a mesh is needed"),
        (lambda x, four, procs: reduce(torch.ones(3), "tp"), LocalTensorError, "of a mesh is needed"),
        (lambda x, four, procs: x.to_mesh(procs), MeshMismatchError, "no axis 'dp' of size 2"),
        (lambda x, four, procs: x.slice_mesh(gpus=0), KeyError, "gpus"),
        (lambda x, four, procs: x.slice_mesh(tp=2), IndexError, "tp"),
        (lambda x, four, procs: x.clone().requires_grad_().reduce("tp", "max"), ReductionError, "no gradient"),
        (lambda x, four, procs: x.clone().requires_grad_().reduce_("tp"), RuntimeError, "autograd does not see"),
        (lambda x, four, procs: x.clone().requires_grad_().reduce("tp", out=x), ValueError, "has no gradient"),
        (lambda x, four, procs: x.reduce("tp", out=x.clone().requires_grad_()), RuntimeError, "autograd does not see"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_sent(
    four: ProcMesh, procs: ProcMesh, wrong: Callable[..., Any], error: type[Exception], text: str
) -> None:
    x = numbered(four, 3, 3)
    with pytest.raises(error, match=text):
        wrong(x, four, procs)
    assert_shards(x.reduce("tp", "max").reduce("tp", "min"), shards(x.reduce("tp", "max")))


def failing_on(x: torch.Tensor, rank: int) -> Tensor:
    """Twice the tensor, but on one rank."""
    assert isinstance(x, Tensor)
    (result,) = issue_call(
        "tests.tensor_engine.on_workers:fail_on",
        (x,),
        (x.remote_value.meta,),
        instruction_stream=x.remote_value.instruction_stream,
        mesh=x.mesh,
        name="told_to_fail",
        static=rank,
    )
    return result


@pytest.mark.parametrize("n", [3, LARGE])
def test_a_failure_on_one_rank_reaches_those_it_communicates_with_and_no_others(
    four: ProcMesh, procs: ProcMesh, n: int
) -> None:
    x = numbered(four, n)
    a, b, c, d = shards(x)
    y = failing_on(x, 1)
    z = y.reduce("tp")
    into = numbered(four, n)
    alias = into[1:]
    y.reduce("tp", out=into)
    y_at_all = y.reduce(("dp", "tp"), "stack")
    moved = y.slice_mesh(dp=0).to_mesh(procs.rename(gpus="tp"))
    assert_failures = [(z, 0), (z, 1), (into, 0), (alias, 1), (y_at_all, 3)]
    for tensor, rank in assert_failures:
        with pytest.raises(RemoteError, match="told to fail") as caught:
            inspect(tensor, dict(four.extent.point(rank)), timeout=PATIENCE_S)
        assert (caught.value.rank, caught.value.operation) == (1, "told_to_fail")
        assert "failing_on" in caught.value.script_stack
        assert "fail_on" in caught.value.worker_stack
    with pytest.raises(RemoteError, match="told to fail") as caught:
        inspect(moved, tp=1, timeout=PATIENCE_S)
    assert "failing_on" in caught.value.script_stack  # also seen from another mesh
    torch.testing.assert_close(inspect(moved, tp=0), 2 * a)
    torch.testing.assert_close(inspect(y), 2 * a)
    torch.testing.assert_close(inspect(z, dp=1), 2 * (c + d))
    torch.testing.assert_close(inspect(into, dp=1, tp=1), 2 * (c + d))
    assert_shards(x.reduce("tp"), [a + b, a + b, c + d, c + d])  # the groups go on


def of_ranks(x: torch.Tensor) -> list[torch.Tensor]:
    return [shard.clone().requires_grad_() for shard in shards(x)]


def test_nothing_is_left_on_the_workers_of_what_the_script_has_forgotten(four: ProcMesh, procs: ProcMesh) -> None:
    x = numbered(four, 4, 3)
    before = values_on(four), values_on(procs)
    kept: list[torch.Tensor] = []
    for _ in range(3):
        y = x.clone().requires_grad_()
        z = y.reduce("tp", "stack").sum(0).slice_mesh(dp=0).to_mesh(procs.rename(gpus="tp"))
        z.to_mesh(four).reduce(("dp", "tp"), mesh=four.slice(dp=0, tp=0)).sum().backward()
        assert y.grad is not None
        kept = [y.grad]
    assert (values_on(four), values_on(procs)) == (before[0] + 2, before[1] + 1)  # y and its gradient, and z
    del y, z, kept
    assert (values_on(four), values_on(procs)) == before


Lists = Callable[[list[torch.Tensor]], list[torch.Tensor]]


def gradient_cases() -> dict[str, tuple[Callable[..., Any], Lists]]:
    return {
        "sum": (lambda x, four, procs: x.reduce("tp"), lambda a: [a[0] + a[1]] * 2 + [a[2] + a[3]] * 2),
        "sum over both": (lambda x, four, procs: x.reduce(("dp", "tp")), lambda a: [a[0] + a[1] + a[2] + a[3]] * 4),
        "avg": (lambda x, four, procs: x.reduce("dp", "avg"), lambda a: [(a[0] + a[2]) / 2, (a[1] + a[3]) / 2] * 2),
        "stack": (
            lambda x, four, procs: x.reduce("tp", "stack"),
            lambda a: [torch.stack((a[0], a[1]))] * 2 + [torch.stack((a[2], a[3]))] * 2,
        ),
        "onto a slice": (
            lambda x, four, procs: x.reduce("tp", "avg", mesh=four.slice(tp=1)),
            lambda a: [(a[0] + a[1]) / 2, (a[2] + a[3]) / 2],
        ),
        "stack onto a rank": (
            lambda x, four, procs: x.reduce(("dp", "tp"), "stack", mesh=four.slice(dp=0, tp=1)),
            lambda a: [torch.stack(a)],
        ),
        "scatter": (
            lambda x, four, procs: x.reduce(("dp", "tp"), scatter=True),
            lambda a: list((a[0] + a[1] + a[2] + a[3]).chunk(4)),
        ),
        "all to all": (
            lambda x, four, procs: x.all_to_all(("dp", "tp")),
            lambda a: [torch.stack([each[i] for each in a]) for i in range(4)],
        ),
        "slice": (lambda x, four, procs: x.slice_mesh(tp=1), lambda a: [a[1], a[3]]),
        "to another mesh": (
            lambda x, four, procs: x.slice_mesh(dp=1).to_mesh(procs.rename(gpus="tp")),
            lambda a: [a[2], a[3]],
        ),
        "to another mesh and back, for all": (
            lambda x, four, procs: (x.slice_mesh(dp=0).to_mesh(procs.rename(gpus="tp")) ** 2).to_mesh(four),
            lambda a: [a[0] ** 2, a[1] ** 2] * 2,
        ),
        "to all of the same mesh": (
            lambda x, four, procs: x.slice_mesh(dp=1, tp=0).to_mesh(four),
            lambda a: [a[2]] * 4,
        ),
    }


@pytest.mark.parametrize("case", gradient_cases())
def test_gradients_are_those_of_the_sum_over_the_ranks(four: ProcMesh, procs: ProcMesh, case: str) -> None:
    on_meshes, on_lists = gradient_cases()[case]
    x = numbered(four, 4, 3)
    plain = of_ranks(x)
    results = on_lists([each.sin() for each in plain])
    sum((result * (place + 1) ** 2).sum() for place, result in enumerate(results)).backward()  # type: ignore[union-attr]

    x.requires_grad_()
    y = on_meshes(x.sin(), four, procs)
    assert_shards(y.detach(), [result.detach() for result in results])
    (y * (ranks(y.mesh) + 1) ** 2).sum().backward()
    assert x.grad is not None
    assert_shards(x.grad, [each.grad if each.grad is not None else torch.zeros(4, 3) for each in plain])


def test_all_gather_puts_shards_together_along_any_dim(four: ProcMesh) -> None:
    x = numbered(four, 2, 3).requires_grad_()
    a, b, c, d = shards(x.detach())
    assert_shards(x.all_gather("tp"), [torch.cat((a, b))] * 2 + [torch.cat((c, d))] * 2)
    assert_shards(x.all_gather(("dp", "tp"), -1), [torch.cat((a, b, c, d), 1)] * 4)
    (x.all_gather("dp", 1)[:, :3] * 2).sum().backward()
    grad = x.grad
    assert grad is not None
    assert_shards(grad, [torch.full((2, 3), 4.0)] * 2 + [torch.zeros(2, 3)] * 2)
    with pytest.raises(IndexError):
        x.all_gather("tp", 2)


def test_trees_of_tensors_are_reduced_moved_and_fetched(four: ProcMesh, procs: ProcMesh) -> None:
    x, y = numbered(four, 3), numbered(four, LARGE)
    tree = {"a": x, "rest": [(y, 7), torch.ones(2), None]}
    a, c = shards(x)[0::2]
    total = reduce(tree["a"], "dp")
    reduced = reduce({"a": x, "more": [y]}, "dp")
    assert isinstance(reduced["more"], list)
    assert_shards(reduced["a"], shards(total))
    assert_shards(reduced["more"][0], shards(y.reduce("dp")))
    moved = to_mesh({"a": x.slice_mesh(tp=0), "here": torch.arange(2)}, procs.rename(gpus="dp"))
    assert_shards(moved["a"], [a, c])
    assert_shards(moved["here"], [torch.arange(2)] * 2)
    found: Any = fetch_shard(tree, dp=1).get(PATIENCE_S)
    assert found["rest"][0][1] == 7
    torch.testing.assert_close(found["rest"][0][0], shards(y)[2])
    assert torch.equal(found["rest"][1], torch.ones(2))  # it was in the script
    torch.testing.assert_close(inspect({"a": x}, dp=1)["a"], c)
    with pytest.raises(ValueError, match="out= is for one tensor"):
        reduce([x], "dp", out=x)  # type: ignore[call-overload]


def test_the_tensors_of_a_tree_go_together_and_fail_alone(four: ProcMesh) -> None:
    x, y, z = numbered(four, 3), numbered(four, 2, 2, dtype=torch.float64), numbered(four, LARGE)
    with four.activate():
        bad = x.index_select(0, torch.tensor([0, 1, 2]) + 10 * four.rank_tensor("tp"))
    wanted = [shards(each.reduce(("dp", "tp"), "avg")) for each in (x, y, z)]
    found = reduce_({"x": x, "more": [bad, y, (z, 5)]}, ("dp", "tp"), "avg")
    assert found["x"] is x
    assert found["more"][2][1] == 5
    for each, want in zip((x, y, z), wanted, strict=True):
        assert_shards(each, want)
    with pytest.raises(RemoteError, match="index_select"):
        inspect(bad, dp=0, tp=0, timeout=PATIENCE_S)


def test_a_tensor_that_is_in_a_tree_twice_is_reduced_twice(four: ProcMesh) -> None:
    with four.activate():
        x, y = torch.ones(3), torch.ones(2)
        reduce_([x, y, x[1:]], "dp")
    assert_shards(x, [torch.tensor([2.0, 4.0, 4.0])] * 4)
    assert_shards(y, [torch.full((2,), 2.0)] * 4)


def test_a_tree_of_which_one_tensor_does_not_fit_is_refused_whole(four: ProcMesh, procs: ProcMesh) -> None:
    x = numbered(four, 3)
    before = shards(x)
    with four.activate():
        weight = torch.ones(2, requires_grad=True)
        integers = torch.ones(2, dtype=torch.int32)
    for bad, error in ((weight, RuntimeError), (integers, ReductionError), (torch.ones(2), LocalTensorError)):
        with pytest.raises(error):
            reduce_([x, bad], "dp", "avg")
    assert_shards(x, before)
    with pytest.raises(KeyError, match="no axis 'dp'"):
        reduce_([x, numbered(procs, 2)], "dp")
    assert_shards(x, before)


def test_gradients_flow_through_the_tensors_of_a_tree(four: ProcMesh) -> None:
    with four.activate():
        x, y = torch.ones(3, requires_grad=True), torch.ones(2)
        total = reduce({"x": x * (four.rank_tensor("dp") + 1.0), "y": y}, "dp")
        (total["x"].sum() + total["y"].sum()).backward()
    assert x.grad is not None
    assert_shards(x.grad, [torch.full((3,), 2.0)] * 2 + [torch.full((3,), 4.0)] * 2)
    with torch.no_grad():
        assert_shards(reduce([y, x.detach()], "dp")[1], [torch.full((3,), 2.0)] * 4)
