"""What the tests believe: DTensor's own splitting code, and bits compared as bits."""

from dataclasses import replace
from functools import cache
from math import prod

import torch
from torch.distributed.tensor.placement_types import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard as TorchStridedShard

from skipper.torchstore.algebra.layout import Layout, Replicate, Shard, StridedShard


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


def as_this_torch_cuts(layout: Layout) -> Layout:
    """The layout, with plain shards for strided ones where DTensor's own code is no oracle for these.

    PyTorch 2.8 cuts into all parts at once what FSDP2 over tensor parallelism has cut twice. The two are the same where
    all parts are full.
    """
    if cuts_what_is_strided_twice():
        return layout
    parts = [1] * len(layout.global_shape)
    for size, placement in zip(layout.mesh_shape, layout.placements, strict=True):
        if not isinstance(placement, Replicate):
            parts[placement.dim] *= size * getattr(placement, "split_factor", 1)
    return replace(
        layout,
        placements=tuple(
            Shard(placement.dim)
            if isinstance(placement, StridedShard) and layout.global_shape[placement.dim] % parts[placement.dim]
            else placement
            for placement in layout.placements
        ),
    )


@cache
def cuts_what_is_strided_twice() -> bool:
    """Whether DTensor of this torch cuts strided shards as FSDP2 over tensor parallelism does: 2.8 does not."""
    shards, _ = TorchStridedShard(0, split_factor=2)._split_tensor(torch.arange(5), 2, with_padding=False)
    return bool(torch.equal(shards[0], torch.tensor([0, 1, 3])))


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Every bit pattern may occur, NaNs included; bools hold 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(high, (prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape) if raw.numel() else torch.empty(shape, dtype=dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in row-major order."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
