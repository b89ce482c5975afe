"""Tell autograd which tensors the store writes to: dataplane writes bytes, which torch itself cannot see.

Torch counts the in-place operations on each tensor and its views. Autograd keeps the count with what it saves for the
backward pass, and refuses to use what has changed since. A get into a tensor counts as such an operation does.
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

    They are counted before and after, whether the write succeeds or not: what was saved before it must not be used
    while they change, nor what is saved meanwhile. Each time costs some 0.05 us a tensor, and 0.5 us where a large copy
    has left none of them in the cache. Inference tensors have no count, since autograd never saves them.

    Args:
        tensors: As the user has given them: a DTensor has a count of its own beside that of its local tensor.
    """
    counted = list(tensors)
    counted += locals_of(counted)
    increment_version(counted)
    try:
        yield
    finally:
        increment_version(counted)


def writing_mode(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """The mode in which torch's own operations may write to a tensor: inference tensors take them in that mode only.

    It makes no difference to what they mean: what reads or writes bytes needs no mode.
    """
    return torch.inference_mode() if tensor.is_inference() else torch.no_grad()
