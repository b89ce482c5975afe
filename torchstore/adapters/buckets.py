"""A stream of weights in pieces of bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch


def buckets(weights: Iterable[tuple[str, torch.Tensor]], nbytes: int) -> Iterator[tuple[dict[str, torch.Tensor], bool]]:
    """Cut a stream of named tensors into state dicts of at most ``nbytes`` bytes, or of a single tensor.

    Args:
        weights: Names and tensors; taken one by one.
        nbytes: Bound on the bytes of one piece.

    Yields:
        A piece, and whether it is the last one. A stream without weights is one empty piece.
    """
    bucket: dict[str, torch.Tensor] = {}
    filled = 0
    for name, tensor in weights:
        if bucket and filled + tensor.nbytes > nbytes:
            yield bucket, False
            bucket, filled = {}, 0
        bucket[name] = tensor
        filled += tensor.nbytes
    yield bucket, True
