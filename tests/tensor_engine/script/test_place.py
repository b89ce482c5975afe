"""Modules, state dicts and other pytrees of the script on the ranks of a mesh."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from skipper.control import ProcMesh
from skipper.tensor_engine import Tensor, inspect, place
from tests.tensor_engine.conftest import PATIENCE_S


class Tied(nn.Module):
    """Two layers of one weight, with buffers and more."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.second.bias.requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("seen", torch.arange(3), persistent=False)
        self.rate = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.second(self.first(x).relu()))
        return y * self.rate


def test_a_module_is_copied_and_its_tensors_are_there(procs: ProcMesh) -> None:
    here = Tied()
    here(torch.ones(2, 4)).sum().backward()
    there = procs.place(here)
    assert there.second.weight is there.first.weight
    assert not there.second.bias.requires_grad
    for (name, one), (_, other) in zip(
        [*here.named_parameters(), *here.named_buffers()],
        [*there.named_parameters(), *there.named_buffers()],
        strict=True,
    ):
        assert isinstance(other, Tensor), name
        assert isinstance(one, nn.Parameter) == isinstance(other, nn.Parameter)
        assert torch.equal(inspect(other, gpus=1, timeout=PATIENCE_S), one)
        assert (one.grad is None) == (other.grad is None)
    assert here.first.weight.grad is not None
    assert there.first.weight.grad is not None
    assert torch.equal(inspect(there.first.weight.grad, timeout=PATIENCE_S), here.first.weight.grad)
    x = torch.randn(5, 4)
    torch.testing.assert_close(inspect(there(procs.place(x)).detach(), timeout=PATIENCE_S), here(x).detach())
    assert type(here.first.weight) is nn.Parameter
    assert isinstance(there.norm.running_mean, Tensor)  # changed in place, each by its own module
    torch.testing.assert_close(inspect(there.norm.running_mean, timeout=PATIENCE_S), here.norm.running_mean)


def test_pytrees_keep_their_form_and_what_is_tied_in_them(procs: ProcMesh) -> None:
    shared = torch.ones(3)
    state = OrderedDict(a=shared, b=[shared, ("name", 3, None)], c={"d": torch.tensor(2, dtype=torch.int16)})
    there = place(state, procs)
    assert type(there) is OrderedDict
    assert there["a"] is there["b"][0]  # type: ignore[index]
    assert there["b"][1] == ("name", 3, None)  # type: ignore[index]
    assert inspect(there["c"]["d"], gpus=1).item() == 2  # type: ignore[call-overload,index]


def test_a_models_state_is_loaded_into_its_copy(procs: ProcMesh) -> None:
    there, other = procs.place(nn.Linear(3, 2)), nn.Linear(3, 2)
    there.load_state_dict(procs.place(other.state_dict()))
    assert torch.equal(inspect(there.weight.detach(), gpus=1, timeout=PATIENCE_S), other.weight)


def test_what_has_no_values_is_refused(procs: ProcMesh) -> None:
    with pytest.raises(NotImplementedError, match="meta"):
        procs.place(nn.Linear(2, 2, device="meta"))
