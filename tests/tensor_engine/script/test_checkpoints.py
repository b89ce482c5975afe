"""What is saved and loaded: `torch.distributed.checkpoint`, and state dicts of the script that go into modules."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from skipper.control import ProcMesh
from skipper.tensor_engine import CheckpointTargetError, LocalTensorError, Tensor, inspect
from skipper.tensor_engine.errors import PickleError
from tests.tensor_engine.conftest import PATIENCE_S

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # the script saves by itself
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),  # by DCP itself, of PyTorch 2.8
]


def at(tensor: torch.Tensor) -> list[Any]:
    return [inspect(tensor.detach(), gpus=rank, timeout=PATIENCE_S).tolist() for rank in range(2)]


@pytest.mark.parametrize("inside", [True, False])
def test_a_checkpoint_has_what_the_first_rank_has(procs: ProcMesh, tmp_path: Path, inside: bool) -> None:
    with procs.activate():
        big = torch.arange(100_000.0).view(200, 500) + procs.rank_tensor("gpus")
        state = {
            "big": big,
            "part": big[1:5, 2:7].t(),
            "half": torch.ones(3, dtype=torch.bfloat16, requires_grad=True),
            "number": torch.tensor(7),
            "none": torch.empty(0, 2),
            "here": torch.arange(3),
            "settings": {"rate": 0.5},
        }
        if inside:
            dcp.save(state, checkpoint_id=tmp_path)
    if not inside:
        dcp.save(state, checkpoint_id=tmp_path)
    expected = torch.arange(100_000.0).view(200, 500)
    loaded: dict[str, Any] = {
        "big": torch.zeros(200, 500),
        "part": torch.zeros(5, 4),
        "half": torch.zeros(3, dtype=torch.bfloat16),
        "number": torch.tensor(0),
        "none": torch.empty(0, 2),
        "here": torch.zeros(3, dtype=torch.int64),
        "settings": {"rate": 0.0},
    }
    dcp.load(loaded, checkpoint_id=tmp_path)
    assert torch.equal(loaded["big"], expected)
    assert torch.equal(loaded["part"], expected[1:5, 2:7].t())
    assert loaded["half"].tolist() == [1, 1, 1]
    assert loaded["number"] == 7
    assert loaded["here"].tolist() == [0, 1, 2]
    assert loaded["settings"] == {"rate": 0.5}


def test_what_has_failed_is_not_saved(procs: ProcMesh, tmp_path: Path) -> None:
    with procs.activate():
        bad = torch.ones(2)[torch.tensor([5])]
        with pytest.raises(CheckpointException, match="RemoteError"):
            dcp.save({"bad": bad}, checkpoint_id=tmp_path)


def test_nothing_is_loaded_into_what_has_been_fetched(procs: ProcMesh, tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path)
    with procs.activate():
        w = torch.zeros(3)
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"w": w}, checkpoint_id=tmp_path)
    (failure,) = caught.value.failures.values()
    assert isinstance(failure[0], CheckpointTargetError)
    assert at(w) == [[0, 0, 0]] * 2


def test_what_is_saved_meanwhile_is_fetched_before(procs: ProcMesh, tmp_path: Path) -> None:
    with procs.activate():
        w = torch.ones(3)
    with pytest.raises(PickleError, match="async_save"):
        copy.deepcopy(w.remote_value)  # type: ignore[attr-defined]  # as async_save of PyTorch 2.13 does, not of 2.8
    dcp.async_save({"w": inspect(w)}, checkpoint_id=tmp_path).result(PATIENCE_S)
    loaded = {"w": torch.zeros(3)}
    dcp.load(loaded, checkpoint_id=tmp_path)
    assert loaded["w"].tolist() == [1, 1, 1]


def test_a_state_dict_of_the_script_goes_into_a_module_of_a_mesh(procs: ProcMesh) -> None:
    here, there = nn.BatchNorm1d(4), procs.place(nn.BatchNorm1d(4))
    here(torch.randn(3, 4))
    with torch.no_grad():
        here.weight.uniform_()
    there.load_state_dict(here.state_dict())
    for one, other in zip(here.state_dict().values(), there.state_dict().values(), strict=True):
        assert isinstance(other, Tensor)
        assert at(other) == [one.tolist()] * 2
    assert there.weight.requires_grad


def test_what_is_copied_into_a_tensor_of_a_mesh_may_be_the_scripts(procs: ProcMesh) -> None:
    with procs.activate():
        x = torch.zeros(2, 3)
    x[:, 1:].copy_(torch.tensor([[1, 2]]))  # into a view, of another dtype, and broadcast
    assert at(x) == [[[0, 1, 2], [0, 1, 2]]] * 2
    with pytest.raises(RuntimeError, match="size"):
        x.copy_(torch.ones(4))
    with pytest.raises(LocalTensorError):
        torch.zeros(2, 3).copy_(x)
    weight = torch.ones(3, requires_grad=True)  # its gradient would be elsewhere
    with pytest.raises(LocalTensorError):
        x.copy_(weight)
    with torch.no_grad():
        x.copy_(weight)
    assert at(x) == [[[1, 1, 1]] * 2] * 2
