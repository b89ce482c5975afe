"""A trainer's weights: which rank puts which, as DTensors made of its shards, in pieces of bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class WeightOwnership:
    """The owners of a trainer's weights.

    Args:
        metadata: For each weight ``name``, ``shape``, ``dtype``, ``owners`` (ranks; None: all) and ``placements``.
        ranks: The number of trainer ranks.

    Attributes:
        is_staged: Whether some weights belong only to some ranks, as in a pipeline.
        is_shared: Whether every rank puts a part of some weight that no other rank has.

    Raises:
        ValueError: A weight has no owner, or an owner that is not a rank.
    """

    def __init__(self, metadata: Sequence[Any], ranks: int) -> None:
        for meta in metadata:
            if meta.owners is not None and (not meta.owners or not all(0 <= owner < ranks for owner in meta.owners)):
                raise ValueError(f"{meta.name} is owned by ranks {meta.owners} of {ranks}")
        self._metadata = metadata
        self.is_staged = any(meta.owners is not None and len(meta.owners) != ranks for meta in metadata)
        self.is_shared = ranks == 1 or self.is_staged or any(meta.placements is not None for meta in metadata)

    def pieces(self, nbytes: int) -> dict[int, list[list[Any]]]:
        """The whole weights that each rank puts, one piece after the other: those of which it is the first owner.

        A piece has at most ``nbytes`` bytes, or is a single weight.

        Returns:
            The pieces by rank, at least one each, for ranks that put anything and for rank 0.
        """
        pieces: dict[int, list[list[Any]]] = {0: [[]]}
        filled: dict[int, int] = {}
        for meta in self._metadata:
            rank = min(meta.owners) if meta.owners else 0
            size = prod(meta.shape) * meta.dtype.itemsize
            cut = pieces.setdefault(rank, [[]])
            if cut[-1] and filled[rank] + size > nbytes:
                cut.append([])
            filled[rank] = (filled[rank] if cut[-1] else 0) + size
            cut[-1].append(meta)
        return dict(sorted(pieces.items()))


def as_dtensors(local: Iterable[tuple[str, torch.Tensor]], metadata: Sequence[Any]) -> dict[str, torch.Tensor]:
    """This rank's parts of its parameters, as DTensors, without copies or communication.

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
    """A mesh that only describes the positions of ranks, without communication.

    Every public function for a mesh creates process groups (or uses existing ones), and all ranks of the job must call
    it together, in the same order. Here the ranks of one pipeline stage describe what they have, without the other
    ranks. So this is the only code that uses an argument of torch without a promise of stability.

    Raises:
        RuntimeError: This version of torch does not have it.
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


def buckets(weights: Iterable[tuple[str, torch.Tensor]], nbytes: int) -> Iterator[tuple[dict[str, torch.Tensor], bool]]:
    """Cut a stream of named tensors into state dicts of at most ``nbytes`` bytes, or of a single tensor.

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
