"""Small values as they travel in messages."""

import pickle

import pytest
import torch

from skipper.torchstore.tensors.values import inline_tensor, open_inline

STORED = torch.arange(6, dtype=torch.float32).reshape(2, 3)


def filled(into: torch.Tensor, packed: bytes | None = None) -> bool:
    return open_inline(packed or inline_tensor(STORED)).fill(into)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_tensor_of_the_same_kind_is_filled(requires_grad: bool) -> None:
    into = torch.zeros(2, 3, requires_grad=requires_grad)
    before = into._version
    assert filled(into)
    assert torch.equal(into, STORED)
    assert into._version > before


def test_an_inference_tensor_is_filled() -> None:
    with torch.inference_mode():
        into = torch.zeros(2, 3)
    assert filled(into)
    assert torch.equal(into, STORED)


@pytest.mark.parametrize(
    "into",
    [
        torch.zeros(2, 3, dtype=torch.int32),
        torch.zeros(3, 2),
        torch.zeros(3, 2).t(),
        torch.zeros(1, 3).expand(2, 3),
        torch.zeros(2, 3, device="meta"),
    ],
    ids=["dtype", "shape", "strides", "expanded", "meta"],
)
def test_another_tensor_is_left_to_others(into: torch.Tensor) -> None:
    assert not filled(into)
    assert into.is_meta or not into.any()


@pytest.mark.parametrize("nbytes", [0, 20, 28])
def test_bytes_that_do_not_fit_are_not_copied(nbytes: int) -> None:
    memory = torch.zeros(8)
    assert not filled(memory[:6].view(2, 3), pickle.dumps((bytes([1]) * nbytes, "torch.float32", (2, 3))))
    assert not memory.any()
