"""The examples' bit comparison can fail: without that its zeros would prove nothing."""

from __future__ import annotations

import math

import pytest
import torch

from examples.verify import mismatched_names, nbytes_held, same_bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_one_flipped_bit_is_noticed(dtype: torch.dtype) -> None:
    sent = torch.ones(3, 5).to(dtype)
    received = sent.clone()
    assert mismatched_names({"w": received}, {"w": sent}) == []
    received.view(torch.uint8)[2, 1] ^= 1
    assert mismatched_names({"w": received}, {"w": sent}) == ["w"]


def test_bits_are_compared_rather_than_values() -> None:
    assert same_bits(torch.tensor([math.nan]), torch.tensor([math.nan]))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.int32))
    assert not same_bits(torch.zeros(2), torch.zeros(1, 2))


def test_a_name_that_only_one_side_has_is_a_mismatch() -> None:
    one = torch.zeros(1)
    assert mismatched_names({"a": one, "b": one}, {"b": one, "c": one}) == ["a", "c"]


def test_held_bytes_count_elements_of_every_size() -> None:
    assert nbytes_held({"a": torch.zeros(3, dtype=torch.bfloat16), "b": torch.zeros(())}) == 10
