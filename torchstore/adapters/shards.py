"""Local shards, described as vLLM's ``ParamMeta`` does, as the DTensors that they are parts of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch


def is_shared_by(metadata: Sequence[Any], ranks: int) -> bool:
    """Whether every one of so many ranks owns every parameter, so that each has a part to put."""
    return all(meta.owners is None or len(meta.owners) == ranks for meta in metadata) and (
        ranks == 1 or any(meta.placements is not None for meta in metadata)
    )


def as_dtensors(local: Iterable[tuple[str, torch.Tensor]], metadata: Sequence[Any]) -> dict[str, torch.Tensor]:
    """This rank's parts of all parameters; no memory is copied and nothing is communicated.

    Args:
        local: Names and local shards.
        metadata: For each parameter ``name``, ``shape``, ``owners`` (ranks), ``mesh_shape`` and ``placements``.
    """
    described = {meta.name: meta for meta in metadata}
    meshes: dict[tuple[Any, ...], Any] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, shard in local:
        meta = described[name]
        whole_here = meta.placements is None or meta.owners is None or len(meta.owners) == 1
        tensors[name] = shard.detach() if whole_here else _part(shard.detach(), meta, meshes)
    return tensors


def _part(shard: torch.Tensor, meta: Any, meshes: dict[tuple[Any, ...], Any]) -> torch.Tensor:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    shape = (meta.owners, meta.mesh_shape)
    if shape not in meshes:
        ranks = torch.tensor(meta.owners).reshape(meta.mesh_shape)
        # Only the layout is needed: no group is made, which all ranks would have to do together.
        meshes[shape] = DeviceMesh(shard.device.type, ranks, _init_backend=False)
    placements = [
        Replicate() if getattr(placement, "dim", None) is None else Shard(placement.dim)
        for placement in meta.placements
    ]
    strides = torch.empty(meta.shape, device="meta").stride()
    return DTensor.from_local(
        shard, meshes[shape], placements, run_check=False, shape=torch.Size(meta.shape), stride=strides
    )
