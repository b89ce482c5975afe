"""Stored versions as metadata of `torch.distributed.checkpoint`, and the reverse."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItem

from skipper.torchstore.algebra.layout import Box, Ints, Piece
from skipper.torchstore.algebra.manifest import Path
from skipper.torchstore.clients.pinning import PinnedVersion, StoredTensor
from skipper.torchstore.errors import KindMismatchError, LayoutMismatchError
from skipper.torchstore.tensors.local_tensors import LocalTensor
from skipper.torchstore.tensors.state_dict import path_of, steps_of

Steps = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """The place of a checkpoint: the ``storage_data`` of its metadata."""

    key: str
    version: int


@dataclass(frozen=True, slots=True)
class EncodedObject:
    """An entry that is not a tensor, in the encoding of a planner that has its own."""

    data: bytes


def metadata_of(pinned: PinnedVersion) -> Metadata:
    """Describe a version that `StoreWriter` or `put_state_dict` has stored."""
    described: dict[str, Any] = {
        name: TensorStorageMetadata(properties_of(tensor), torch.Size(tensor.shape), _chunks(tensor))
        for name, tensor in pinned.tensors().items()
    }
    described |= {name: BytesStorageMetadata() for name in pinned.objects()}
    steps = {name: steps_of(path) for name, path in pinned.paths().items() if name in described}
    return Metadata(described, planner_data=steps, storage_data=Stored(pinned.key, pinned.version))


def properties_of(tensor: StoredTensor) -> TensorProperties:
    """DCP's properties of a tensor, for this version of torch: newer versions include the strides."""
    return TensorProperties.create_from_tensor(torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta"))


def boxes_of(tensor: StoredTensor) -> tuple[Box, ...]:
    """The parts of a tensor; one empty part if it has no elements."""
    return tensor.boxes or (Box.whole(tensor.shape),)


def _chunks(tensor: StoredTensor) -> list[ChunkStorageMetadata]:
    return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.shape)) for box in boxes_of(tensor)]


def paths_of(names: Sequence[str], steps: Mapping[str, Steps] | None) -> dict[str, Path]:
    """How names lead back into the nested state dict that a planner flattened; else nothing is nested."""
    return {name: path_of((steps or {}).get(name, (name,))) for name in names}


def part_of(
    name: str, dtype: torch.dtype, global_shape: Sequence[int], chunks: Sequence[tuple[Sequence[int], torch.Tensor]]
) -> LocalTensor:
    """The chunks that one rank has of a tensor, as a `LocalTensor` of the store.

    ``chunks`` has the offsets and elements of each chunk; they do not overlap.

    Raises:
        KindMismatchError: A chunk has another dtype, or another number of dims, than the tensor.
        LayoutMismatchError: A chunk reaches out of the tensor.
    """
    whole = tuple(global_shape)
    for offsets, tensor in chunks:
        if tensor.dtype != dtype or not len(offsets) == tensor.ndim == len(whole):
            raise KindMismatchError(
                name, f"a chunk of {dtype} and shape {whole} cannot be {tensor.dtype}, {tensor.shape}"
            )
        if any(start < 0 or start + size > end for start, size, end in zip(offsets, tensor.shape, whole, strict=True)):
            raise LayoutMismatchError(
                name, f"a chunk at {tuple(offsets)} of shape {tuple(tensor.shape)} is not within {whole}"
            )
    full = [(tuple(offsets), tensor.detach()) for offsets, tensor in chunks if tensor.numel()]
    if not full:
        return LocalTensor(chunks[0][1].detach(), whole, ())
    if len(full) == 1:
        ((offsets, tensor),) = full
        return LocalTensor(tensor, whole, (Piece(Box(offsets, tuple(tensor.shape)), (0,) * tensor.ndim),))
    return _beside_each_other(whole, full)


def _beside_each_other(whole: Ints, chunks: Sequence[tuple[Ints, torch.Tensor]]) -> LocalTensor:
    """Chunks of any shapes, copied into one tensor along its first dim."""
    shapes = [tuple(tensor.shape) for _, tensor in chunks]
    room = (
        sum(shape[0] for shape in shapes),
        *(max(sizes) for sizes in zip(*(shape[1:] for shape in shapes), strict=True)),
    )
    joined = torch.zeros(room, dtype=chunks[0][1].dtype, device=chunks[0][1].device)
    pieces: list[Piece] = []
    start = 0
    for (offsets, tensor), shape in zip(chunks, shapes, strict=True):
        place = (slice(start, start + shape[0]), *(slice(size) for size in shape[1:]))
        joined[place].copy_(tensor)
        pieces.append(Piece(Box(offsets, shape), (start, *(0 for _ in shape[1:]))))
        start += shape[0]
    return LocalTensor(joined, whole, tuple(pieces))


def encode(value: Any) -> io.BytesIO:
    """An entry that is not a tensor, as the stream that planners expect."""
    if isinstance(value, EncodedObject):
        return io.BytesIO(value.data)
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream


def nbytes_of(shape: Sequence[int], dtype: torch.dtype) -> int:
    """The size of a dense tensor, in bytes."""
    return prod(shape) * dtype.itemsize


def written_nbytes(item: WriteItem) -> int:
    """The size of a tensor's chunk, in bytes; objects count as 0, because they travel in the message."""
    data = item.tensor_data
    return 0 if data is None else nbytes_of(data.chunk.sizes, data.properties.dtype)
