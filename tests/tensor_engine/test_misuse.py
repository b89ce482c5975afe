"""What does not fit is an error at the line that does it, which says what to do instead."""

import copy
import pickle

import pytest
import torch

from skipper.control import ProcMesh
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
