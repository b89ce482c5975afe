"""Local shards, described as vLLM's ``ParamMeta`` does, as the DTensors that they are parts of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def as_dtensors(local: Iterable[tuple[str, torch.Tensor]], metadata: Sequence[Any]) -> dict[str, torch.Tensor]:
    """This rank's parts of its parameters; no memory is copied and nothing is communicated.

    Args:
        local: Names and local shards.
        metadata: For each parameter ``name``, ``shape``, ``owners`` (ranks), ``mesh_shape`` and ``placements``.
    """
    described = {meta.name: meta for meta in metadata}
    meshes: dict[tuple[Any, ...], DeviceMesh] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, shard in local:
        meta = described[name]
        whole_here = meta.placements is None or meta.owners is None or len(meta.owners) == 1
        tensors[name] = shard.detach() if whole_here else _part(shard.detach(), meta, meshes)
    return tensors


def mesh_of(device_type: str, owners: Sequence[int], shape: Sequence[int]) -> DeviceMesh:
    """A mesh that says which rank has which place, over which nothing can be communicated.

    Every public way to a mesh makes process groups (or takes those that are there), and all ranks of the job have to
    do that together, in the same order. Here the ranks of one stage of a pipeline describe what they have and the
    others know nothing of it. So this is the one place that uses an argument that torch does not promise to keep.

    Raises:
        RuntimeError: This torch does not have it.
    """
    from torch.distributed.device_mesh import DeviceMesh

    ranks = torch.tensor(owners).reshape(tuple(shape))
    try:
        return DeviceMesh(device_type, ranks, _init_backend=False)
    except TypeError as error:
        raise RuntimeError(
            f"torch {torch.__version__} has no DeviceMesh without process groups (_init_backend=False), by which "
            "torchstore.adapters describes shards; use a source of whole tensors (iter_full), or an older torch"
        ) from error


def _part(shard: torch.Tensor, meta: Any, meshes: dict[tuple[Any, ...], DeviceMesh]) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    shape = (meta.owners, meta.mesh_shape)
    if shape not in meshes:
        meshes[shape] = mesh_of(shard.device.type, meta.owners, meta.mesh_shape)
    placements = [
        Replicate() if getattr(placement, "dim", None) is None else Shard(placement.dim)
        for placement in meta.placements
    ]
    strides = torch.empty(meta.shape, device="meta").stride()
    return DTensor.from_local(
        shard, meshes[shape], placements, run_check=False, shape=torch.Size(meta.shape), stride=strides
    )
