"""Tells autograd which tensors the store writes to: the data plane writes bytes, which torch cannot see.

Torch counts the in-place operations on each tensor and its views. Autograd keeps the count with the tensors that it
saves for the backward pass, and refuses to use a tensor that has changed since. A get into a tensor counts as such an
operation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch.autograd.graph import increment_version

from skipper.torchstore.tensors.local_tensors import locals_of


@contextmanager
def written(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Count a write to tensors, around the code that writes their bytes.

    Writes are counted before and after the block, even if it fails: autograd must not use tensors that it saved before
    the write once the write has begun, nor tensors that it saves during the write. Each count costs about 0.05 us for
    each tensor, or 0.5 us if a large copy has removed them from the cache. Inference tensors have no count, because
    autograd never saves them.

    Args:
        tensors: The user's tensors: a DTensor has its own count, in addition to that of its local tensor.
    """
    counted = list(tensors)
    counted += locals_of(counted)
    increment_version(counted)
    try:
        yield
    finally:
        increment_version(counted)


def writing_mode(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """The mode in which torch's own operations may write to a tensor: for inference tensors, only inference mode.

    The mode does not change the result; code that reads or writes bytes needs no mode.
    """
    return torch.inference_mode() if tensor.is_inference() else torch.no_grad()
