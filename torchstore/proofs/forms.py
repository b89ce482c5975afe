"""The certified form of a model's tensors: their dtype may differ from the stored one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch

from skipper.torchstore.proofs.certified_tensor import CertifiedTensor
from skipper.torchstore.tensors.tiles import TileKey
from skipper.torchstore.tensors.values import dtype_named

_SMALL = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_LARGE = frozenset({torch.float32, torch.float64})
_EXACT = {
    torch.float8_e4m3fn: _SMALL,
    torch.float8_e5m2: _SMALL,
    torch.float16: _LARGE,
    torch.bfloat16: _LARGE,
    torch.float32: frozenset({torch.float64}),
}
"""The dtypes that represent every number of another dtype, so that a conversion can be undone."""


@dataclass(frozen=True, slots=True)
class Held:
    """The part of a checkpoint tensor that a parameter holds.

    Attributes:
        name: The name of the tensor in the checkpoint.
        parameter: The name of the parameter in the model.
        dtypes: The dtypes that its elements had one after the other: when they were read first, here last.
    """

    name: str
    parameter: str
    dtypes: tuple[str, ...]


def find_form(held: Held, certified: Mapping[TileKey, CertifiedTensor]) -> tuple[TileKey, torch.dtype] | str:
    """The form in which the elements are certified and their dtype there, or the reason why they are not certified.

    A dtype that represents all numbers of the one before has changed nothing: its elements are converted back for the
    comparison. Rounded elements are certified in the dtype to which they were rounded, if the publisher certified that
    dtype.
    """
    stored = certified[held.name, ""]
    dtypes = [dtype_named(name) for name in held.dtypes]
    while len(dtypes) > 1 and _is_exact(*dtypes[-2:]):
        dtypes.pop()
    if any(not _is_exact(before, after) for before, after in pairwise(dtypes[:-1])):
        return f"it was rounded more than once ({' to '.join(held.dtypes)})"
    dtype = dtypes[-1]
    if dtype == dtype_named(stored.dtype):
        return (held.name, ""), dtype
    at = (held.name, str(dtype))
    if at not in certified:
        return f"it is here as {dtype}, and certified as {stored.dtype} only: put it with certify=({dtype},)"
    return at, dtype


def _is_exact(before: torch.dtype, after: torch.dtype) -> bool:
    return before == after or after in _EXACT.get(before, ())
