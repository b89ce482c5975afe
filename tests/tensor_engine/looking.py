"""Short words for looking at tensors of the mesh of two workers."""

import pytest
import torch

from skipper.tensor_engine import inspect
from tests.tensor_engine.conftest import PATIENCE_S


def value(tensor: torch.Tensor, rank: int = 1) -> torch.Tensor:
    return inspect(tensor.detach(), gpus=rank, timeout=PATIENCE_S)


def same(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(value(one), value(other), rtol=0, atol=0)


def holds(tensor: torch.Tensor, expected: list[float], rank: int = 1) -> None:
    assert value(tensor, rank).tolist() == pytest.approx(expected)


def numbers(*shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.cos(torch.arange(count, dtype=torch.float32)).reshape(shape)
