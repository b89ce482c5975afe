"""What does not fit is an error at the line that does it, which says what to do instead."""

import copy
import pickle

import pytest
import torch

from skipper.control import ProcMesh, this_host
from skipper.tensor_engine import (
    DroppedTensorError,
    LocalTensorError,
    MeshMismatchError,
    NoActiveMeshError,
    Tensor,
    get_active_mesh,
    inspect,
    no_mesh,
)
from tests.tensor_engine.conftest import PATIENCE_S


def test_tensors_of_the_script_are_not_mixed_in(procs: ProcMesh) -> None:
    here = torch.ones(2)
    with procs.activate():
        there = torch.ones(2)
        with pytest.raises(LocalTensorError, match=r"activate"):
            there + here
        twice = here + here
    assert type(twice) is torch.Tensor  # it has met nothing from elsewhere
    with pytest.raises(LocalTensorError, match=r"to_mesh"):
        torch.cat([there, here])
    with pytest.raises(LocalTensorError, match="of a mesh is needed"):
        inspect(here)


def test_numbers_of_the_script_go_along(procs: ProcMesh) -> None:
    """Tensors without dimensions, as torch lets them among those of a GPU."""
    two = torch.tensor(2.0)
    with procs.activate():
        x = torch.ones(3) * (procs.rank_tensor("gpus") + 1)
    assert inspect(x * two + torch.tensor(1), gpus=1, timeout=PATIENCE_S).tolist() == [5, 5, 5]
    assert (two.double() * x).dtype is torch.float32  # promoted as a number of torch's is
    x[x > 1.5] = 7.0
    assert [inspect(x, gpus=rank, timeout=PATIENCE_S).tolist() for rank in range(2)] == [[1, 1, 1], [7, 7, 7]]
    with pytest.raises(LocalTensorError):
        two.mul_(x[0])  # it would have to be changed here
    parameter = torch.tensor(1.0, requires_grad=True)
    with pytest.raises(LocalTensorError):
        x * parameter  # its gradient would be elsewhere
    with torch.no_grad():
        assert inspect(x * parameter, timeout=PATIENCE_S).tolist() == [1, 1, 1]


def test_what_gives_the_script_a_value_gives_that_of_the_first_rank(procs: ProcMesh) -> None:
    with procs.activate():
        rank = procs.rank_tensor("gpus")
        x, y = torch.zeros(3), torch.zeros(3) + rank
        near = x + 1e-9
    assert f"{y[0] + 0.5:.2f} {rank:03d}" == "0.50 000"
    assert f"{x}" == repr(x)
    assert torch.equal(x, y)
    assert not torch.equal(x, x[:2])
    assert not torch.equal(x, near)
    assert torch.allclose(x, near)
    assert not torch.allclose(x, near, atol=1e-10)
    with pytest.raises(LocalTensorError):
        torch.equal(x, torch.zeros(3))


def test_under_no_mesh_torch_works_in_the_script(procs: ProcMesh) -> None:
    here = torch.ones(2)
    with procs.activate():
        with no_mesh():
            doubled = here * 2 + torch.zeros(2)
            with pytest.raises(NoActiveMeshError):
                get_active_mesh()
        assert get_active_mesh() == procs
        assert isinstance(torch.ones(1), Tensor)
    assert type(doubled) is torch.Tensor
    assert doubled.tolist() == [2, 2]
    assert type(torch.ones(1)) is torch.Tensor


def test_tensors_of_different_meshes_do_not_meet(four: ProcMesh, procs: ProcMesh) -> None:
    with four.slice(dp=0).activate():
        x = torch.ones(2)
    with four.activate():
        y = torch.ones(2)
    with procs.activate():
        z = torch.ones(2)
    for other in (y, z):
        with pytest.raises(MeshMismatchError, match=r"to_mesh.*slice_mesh"):
            x + other
    alike = this_host().spawn_procs({"gpus": 2}, env={"OMP_NUM_THREADS": "1"})
    try:
        with (
            alike.activate(),
            pytest.raises(MeshMismatchError, match=r"two meshes that are both called <ProcMesh procs"),
        ):
            torch.ones(2) + z
    finally:
        alike.stop().get(PATIENCE_S)


def test_a_dropped_tensor_is_not_used_and_its_views_are(procs: ProcMesh) -> None:
    with procs.activate():
        x = torch.arange(4.0)
    view = x[1:]
    x.drop()
    x.drop()
    with pytest.raises(DroppedTensorError):
        x + 1
    with pytest.raises(DroppedTensorError):
        inspect(x)
    assert inspect(view + 1).tolist() == [2, 3, 4]


def test_values_that_are_not_here_are_not_had_by_the_ways_of_tensors_that_are(procs: ProcMesh) -> None:
    with procs.activate():
        x = torch.ones(2, requires_grad=True)
    with pytest.raises(LocalTensorError, match="inspect"):
        x.numpy()
    with pytest.raises(LocalTensorError, match="inspect"):
        pickle.dumps(x)
    with pytest.raises(TypeError, match="activate"):
        Tensor([1, 2])
    assert "float32[2] on cpu" in repr(x)
    assert "requires_grad=True" in repr(x)
    assert inspect(copy.deepcopy(x)).tolist() == [1, 1]


def test_axes_that_are_not_there(procs: ProcMesh) -> None:
    with procs.activate():
        x = torch.ones(2)
    with pytest.raises(KeyError):
        inspect(x, tp=0)
    with pytest.raises(IndexError):
        inspect(x, gpus=2)
    with pytest.raises(KeyError):
        procs.rank_tensor("tp")


def test_several_meshes_in_one_script(procs: ProcMesh, four: ProcMesh) -> None:
    with four.activate():
        y = torch.ones(2) * four.rank_tensor("tp")
        with procs.activate():
            x = torch.zeros(2)
        y = y + torch.ones(2)
    assert (inspect(x, gpus=1).tolist(), inspect(y, dp=1, tp=1).tolist()) == ([0, 0], [2, 2])
