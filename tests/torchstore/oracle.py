"""What the tests believe: DTensor's own splitting code, and bits compared as bits."""

from math import prod

import torch
from torch.distributed.tensor.placement_types import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard as TorchStridedShard

from skipper.torchstore.algebra.layout import Layout, Replicate, StridedShard


def shard_tensor(tensor: torch.Tensor, layout: Layout, coordinate: tuple[int, ...]) -> torch.Tensor:
    """The local tensor by DTensor's own splitting code, axis after axis."""
    local = tensor
    for axis, placement in enumerate(layout.placements):
        if isinstance(placement, Replicate):
            continue
        theirs = (
            TorchStridedShard(placement.dim, split_factor=placement.split_factor)
            if isinstance(placement, StridedShard)
            else TorchShard(placement.dim)
        )
        shards, _ = theirs._split_tensor(local, layout.mesh_shape[axis], with_padding=False)
        local = shards[coordinate[axis]]
    return local


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Every bit pattern may occur, NaNs included; bools hold 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(high, (prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape) if raw.numel() else torch.empty(shape, dtype=dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in row-major order."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
