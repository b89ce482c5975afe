"""How each side cuts the tensors of a checkpoint, whatever their shapes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

LAYOUTS = ("rows", "columns", "grid")
"""``rows``: by the first dim. ``columns``: by the last. ``grid``: a 2-D mesh, first dim by last dim."""


def mesh_shape(layout: str, processes: int) -> tuple[int, ...]:
    """The axes of the device mesh that ``layout`` needs; an odd number makes a grid of one row of columns."""
    if layout != "grid":
        return (processes,)
    return (2, processes // 2) if processes % 2 == 0 else (1, processes)


def placements_for(layout: str, shape: Sequence[int]) -> tuple[Placement, ...]:
    """Where a tensor of ``shape`` goes: cut where it has the dims for it, else whole everywhere."""
    last = len(shape) - 1
    rows: Placement = Shard(0) if last >= 0 else Replicate()
    columns: Placement = Shard(last) if last >= 1 else Replicate()
    return {"rows": (rows,), "columns": (columns,), "grid": (rows, columns)}[layout]


def local_box(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[slice, ...]:
    """Which part of a tensor lies in this process: a slice for each dim, of which some may be empty.

    The pieces are as `torch.chunk` makes them: equal, but for the last ones, which may be short or empty.
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError("this process is not in the mesh")
    begins, ends = [0] * len(shape), list(shape)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            dim = placement.dim
            piece = -(-(ends[dim] - begins[dim]) // mesh.size(axis))
            begins[dim] = min(begins[dim] + piece * coordinate[axis], ends[dim])
            ends[dim] = min(begins[dim] + piece, ends[dim])
    return tuple(map(slice, begins, ends))


def as_dtensor(local: Tensor, shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Wrap this process' part, without a copy, as a DTensor of ``shape``."""
    stride = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return DTensor.from_local(local, mesh, list(placements), run_check=False, shape=torch.Size(shape), stride=stride)
