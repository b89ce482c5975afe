"""The places of a value's bytes: from tensors to a manifest, in an arena or in the tensors' own memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from skipper import dataplane
from skipper.torchstore.algebra.layout import Replicate, contiguous_strides
from skipper.torchstore.algebra.manifest import WHOLE, BlockScaled, Kind, Manifest, MeshPosition, Mode, Path, TensorItem
from skipper.torchstore.support.records import Cost
from skipper.torchstore.tensors.checksums import count_sums, fill_sums
from skipper.torchstore.tensors.local_tensors import LocalTensor, describe, resolved, same_elements, storage_of

_ALIGNMENT = 64  # a cache line: every tensor of an arena starts on one


@dataclass(frozen=True, slots=True)
class Packed:
    """A described value, which later puts of the same tensors use again.

    Attributes:
        mark: The fingerprint of the tensors; () for a value that is put once.
        tensors: The local tensors of the manifest's items.
        nbytes: The size of the arena that holds them; 0 in direct mode.
        storages: Direct mode: the memory to register, in the order of the manifest's buffer indices.
        sums: The buffer for the checksums of the tensors, which every put fills again; None without checksums.
    """

    mark: tuple[Any, ...]
    manifest: Manifest
    tensors: Mapping[str, LocalTensor]
    nbytes: int
    storages: tuple[torch.Tensor, ...] = ()
    sums: torch.Tensor | None = None


def pack(
    key: str,
    kind: Kind,
    mode: Mode,
    tensors: Mapping[str, torch.Tensor | LocalTensor],
    *,
    paths: Mapping[str, Path] | None = None,
    objects: tuple[str, ...] = (),
    mark: tuple[Any, ...] = (),
    pickled: bool = False,
    checksum: bool = False,
    scaled: Mapping[str, BlockScaled] | None = None,
    publisher: tuple[int, int] | None = None,
) -> Packed:
    """Describe the tensors of a value and lay them out.

    A plain value has the only name "". Mode "snapshot" lays the tensors out one after the other, "direct" uses their
    present places. ``mark`` is the fingerprint by which the result is found again, () if it is never looked up.
    ``scaled`` describes the quantized ones. ``publisher`` is the index of this publisher and the number of publishers;
    None: the mesh of the tensors decides.

    Raises:
        MismatchError: A tensor cannot be stored (`tensors.describe` says when).
    """
    scaled = scaled or {}
    locals_ = {
        name: describe(_resolved(tensor, mode), key=f"{key}/{name}" if name else key)
        for name, tensor in tensors.items()
    }
    part = _part(locals_.values()) if publisher is None else _part_of(*publisher)
    items: dict[str, TensorItem] = {}
    tied: dict[tuple[Any, ...], int] = {}
    storages: dict[int, tuple[int, torch.Tensor]] = {}
    end = 0
    for name, local in locals_.items():
        tensor = local.tensor
        itemsize = tensor.element_size()
        pieces = local.pieces
        if mode == "direct":
            buffer, start = 0, 0
            if pieces:
                storage = storage_of(tensor)
                buffer, storage = storages.setdefault(storage.data_ptr(), (len(storages), storage))
                start = tensor.data_ptr() - storage.data_ptr()
            strides = tensor.stride()
        else:
            if _is_second_copy(local, part, all_put=publisher is not None and publisher[1] > 1):
                pieces = ()
            buffer, start, strides = 0, end, contiguous_strides(tensor.shape)
            if pieces:
                start = tied.setdefault(same_elements(tensor), end)
            if start == end and pieces:
                end += -(-prod(tensor.shape) * itemsize // _ALIGNMENT) * _ALIGNMENT
        items[name] = TensorItem(
            dtype=str(tensor.dtype),
            global_shape=local.global_shape,
            pieces=pieces,
            buffer=buffer,
            offset=start,
            strides=tuple(stride * itemsize for stride in strides),
            itemsize=itemsize,
            pickled=pickled,
            scaled=scaled.get(name),
        )
    memory = tuple(storage for _, storage in storages.values())
    sums: torch.Tensor | None = None
    place: tuple[int, int] | None = None
    if checksum and (count := count_sums(items)):
        if mode == "direct":  # registered in addition to the tensors
            sums, place = dataplane.empty((count,), torch.int64), (len(memory), 0)
            memory = (*memory, sums)
        else:  # the end of the arena
            sums, place = torch.empty(count, dtype=torch.int64, device="cpu"), (0, end)
            end += sums.nbytes
    manifest = Manifest.of(kind, part, items, objects, paths or {}, place)
    return Packed(mark, manifest, locals_, end, memory, sums)


async def take_sums(packed: Packed, cost: Cost) -> None:
    """Compute the checksums of the tensors as they are now, before any of them is copied or read."""
    if packed.sums is not None:
        with cost.spent_on("verify"):
            await asyncio.to_thread(fill_sums, packed.sums, packed.manifest.tensors, packed.tensors)


def _resolved(tensor: torch.Tensor | LocalTensor, mode: Mode) -> torch.Tensor | LocalTensor:
    """The tensor to describe: itself in direct mode, and if it is resolved already."""
    return tensor if mode == "direct" or isinstance(tensor, LocalTensor) else resolved(tensor)


def _part(tensors: Iterable[LocalTensor]) -> MeshPosition:
    """The mesh over which a value is distributed: the largest one along which some tensor is sharded.

    A value without sharded tensors, even with replicated DTensors, is whole: each put of it is complete.
    """
    best = WHOLE
    for local in tensors:
        layout = local.layout
        if layout is None or not layout.sharded_axes() or not local.coordinate:
            continue
        if layout.mesh_shape == best.mesh_shape:
            axes = tuple(sorted({*best.sharded_axes, *layout.sharded_axes()}))
            best = MeshPosition(best.coordinate, best.mesh_shape, axes)
        elif prod(layout.mesh_shape) > prod(best.mesh_shape) or not best.mesh_shape:
            best = MeshPosition(local.coordinate, layout.mesh_shape, layout.sharded_axes())
    return best


def _part_of(index: int, count: int) -> MeshPosition:
    """A publisher that differs from the others only by its index."""
    return MeshPosition((index,), (count,), (0,)) if count > 1 else WHOLE


def _is_second_copy(local: LocalTensor, part: MeshPosition, *, all_put: bool) -> bool:
    """Whether a rank of the same publication with a lower coordinate stores the same elements.

    ``all_put``: the value is whole only after every rank of every mesh has put.
    """
    layout = local.layout
    if layout is None or not local.coordinate:
        return False
    if not all_put and (not part.mesh_shape or layout.mesh_shape != part.mesh_shape):
        return False
    return any(
        isinstance(placement, Replicate) and index > 0
        for placement, index in zip(layout.placements, local.coordinate, strict=True)
    )
