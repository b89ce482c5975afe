"""Which dtype of a tensor is compared with the certificate, and what cannot be."""

import pytest
import torch

from skipper.torchstore.proofs.certified_tensor import CertifiedTensor
from skipper.torchstore.proofs.forms import Held, find_form

STORED, STATED = ("w", ""), ("w", "torch.bfloat16")
HALF, FULL, EIGHT = "torch.bfloat16", "torch.float32", "torch.float8_e4m3fn"


def certified(stored: str, *, quantized: bool = False) -> dict[tuple[str, str], CertifiedTensor]:
    tensor = CertifiedTensor(stored.removeprefix("torch."), (3,), bytes(32), quantized)
    return {STORED: tensor, STATED: CertifiedTensor("bfloat16", (3,), bytes(32), quantized)}


@pytest.mark.parametrize(
    ("stored", "dtypes", "at", "dtype"),
    [
        (FULL, (FULL,), STORED, torch.float32),
        (HALF, (HALF, FULL), STORED, torch.bfloat16),
        (HALF, (HALF, FULL, "torch.float64"), STORED, torch.bfloat16),
        (HALF, (HALF, FULL, HALF), STORED, torch.bfloat16),
        (FULL, (FULL, HALF), STATED, torch.bfloat16),
        (FULL, (FULL, HALF, FULL), STATED, torch.bfloat16),
        (EIGHT, (EIGHT, HALF), STORED, torch.float8_e4m3fn),
        ("torch.int64", ("torch.int64",), STORED, torch.int64),
    ],
)
def test_what_was_widened_is_narrowed_again_and_what_was_rounded_is_looked_up(
    stored: str, dtypes: tuple[str, ...], at: tuple[str, str], dtype: torch.dtype
) -> None:
    assert find_form(Held("w", "parameter", dtypes), certified(stored)) == (at, dtype)


@pytest.mark.parametrize(
    ("dtypes", "why"),
    [
        ((FULL, "torch.float16"), "certified as float32 only: put it with certify=(torch.float16,)"),
        ((FULL, HALF, EIGHT), "rounded more than once"),
        ((FULL, "torch.int32"), "certified as float32 only"),
    ],
)
def test_what_is_certified_in_no_form_that_it_has_had_is_said_so(dtypes: tuple[str, ...], why: str) -> None:
    found = find_form(Held("w", "parameter", dtypes), certified(FULL))
    assert isinstance(found, str)
    assert why in found


def test_the_values_of_a_quantized_tensor_are_certified_in_the_dtype_in_which_they_are_read() -> None:
    quantized = certified(EIGHT, quantized=True)
    assert find_form(Held("w", "w", (HALF,)), quantized) == (STATED, torch.bfloat16)
    assert find_form(Held("w", "w", (HALF, FULL)), quantized) == (STATED, torch.bfloat16)
    assert find_form(Held("w", "w", (EIGHT,)), quantized) == (STORED, torch.float8_e4m3fn)
