"""Bit-for-bit comparison of received weights with what they should be.

It cuts the expected tensors with torch's own DTensor, so it shares no code with the transfer it checks.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def local_part(value: Tensor) -> Tensor:
    """What of ``value`` lies in this process."""
    return value.to_local() if isinstance(value, DTensor) else value


def nbytes_held(weights: Mapping[str, Tensor]) -> int:
    """Bytes of ``weights`` that lie in this process."""
    return sum(part.numel() * part.element_size() for part in map(local_part, weights.values()))


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are equal in dtype, shape and every bit: a NaN equals itself, -0.0 is not 0.0."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    flat = (tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (left, right))
    return torch.equal(*flat)


def mismatched_names(received: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> list[str]:
    """Names whose local part in ``received`` differs from that part of ``whole``, or that one side lacks.

    Args:
        received: Plain tensors and DTensors; no collective is run.
        whole: Full tensors under the same names.
    """
    wrong = sorted(received.keys() ^ whole.keys())
    for name in sorted(received.keys() & whole.keys()):
        value, expected = received[name], whole[name]
        if isinstance(value, DTensor):
            cut = distribute_tensor(expected, value.device_mesh, value.placements, src_data_rank=None)
            expected = cut.to_local()
        if not same_bits(local_part(value).cpu(), expected.cpu()):
            wrong.append(name)
    return wrong
