"""The tiles of a tensor, whose digests certify a version: they are cut from the whole tensor, never from shards.

A tile is a box of some thousand elements at a fixed place of the global tensor, and its digest is a cryptographic hash
of its elements, row by row. So two processes that hold a tile get the same digest, in any layouts. The edge of a shard
may cut a tile. The digest of a tile cannot be computed from the digests of its parts (except with a much slower hash).
So a process' part of a cut tile, a *fragment*, is sent as bytes to the process that joins the tiles. There are few
fragments: tiles end where layouts usually cut.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product, repeat
from math import prod
from types import EllipsisType

import numpy as np
import torch
from numpy.typing import NDArray

from skipper.torchstore.algebra.layout import Box, Ints, minus, plus
from skipper.torchstore.tensors.cells import as_bits, cells, grid_shape, grid_slice, region, whole_cells
from skipper.torchstore.tensors.stream_order import settle

DIGEST_NBYTES = 32

_NUMEL = 4096
"""Elements of a tile: its digest is then 1/256 of bfloat16 weights."""

_COLUMNS = 256
"""Columns of a tile of a matrix, which then has 16 rows. Tensor parallelism cuts at multiples of both, and with FSDP on
up to some hundred ranks, each rank has that many rows of most matrices. Along the dim of experts a tile has one
index."""

_STRIP_NBYTES = 1 << 20
"""Bytes of elements that are brought into the order of tiles, and to the host, at a time."""

_TILE = hashlib.sha256(b"skipper tile\0")
"""SHA-256, for which processors have instructions: here 1.4 times as fast as BLAKE2b. Its prefix is unique."""

_MOST_THREADS = 8

TileKey = tuple[str, str]
"""The name of a tensor, and its certified form: "" as it is stored, or the dtype to which it is converted."""


@dataclass(frozen=True, slots=True)
class TileBlock:
    """Whole tiles that form a box.

    Attributes:
        box: The box in the whole tensor.
        digests: The digests of its tiles, row by row.
    """

    box: Box
    digests: bytes


@dataclass(frozen=True, slots=True)
class TileFragment:
    """A part of one tile.

    Attributes:
        box: The box in the whole tensor.
        data: Its elements, row by row.
    """

    box: Box
    data: bytes


@dataclass(frozen=True, slots=True)
class TensorTiles:
    """The digests and fragments of one tensor's tiles from one process.

    Attributes:
        dtype: The dtype as torch prints it: "torch.bfloat16".
        shape: The shape of the whole tensor.
        is_quantized: Whether it is stored as small floats whose values depend on separate scales.
    """

    dtype: str
    shape: Ints
    blocks: tuple[TileBlock, ...]
    fragments: tuple[TileFragment, ...]
    is_quantized: bool = False


TensorsTiles = Mapping[TileKey, TensorTiles]


def tile_shape(shape: Ints) -> Ints:
    """The shape of the tiles of a tensor: up to 4,096 elements, the last dims first."""
    tile: list[int] = []
    room = _NUMEL
    for size in reversed(shape):
        limit = _COLUMNS if len(shape) > 1 and not tile else 1 << (room.bit_length() - 1)
        tile.append(max(min(size, limit), 1))
        room = max(room // tile[-1], 1)
    return tuple(reversed(tile))


def count_tiles(shape: Ints) -> int:
    """The number of tiles of a tensor."""
    return prod(-(-size // step) for size, step in zip(shape, tile_shape(shape), strict=True))


def tile_digest(data: bytes | memoryview) -> bytes:
    """The digest of one tile's elements, row by row."""
    found = _TILE.copy()
    found.update(data)
    return found.digest()


def hashing_threads() -> Executor:
    """Threads for hashing, which releases the GIL: one for each processor, up to a limit. They start when needed."""
    return ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), _MOST_THREADS), "skipper-tiles")


@torch.no_grad()
def take_tiles(
    parts: Iterable[tuple[Box, torch.Tensor]], shape: Ints, threads: Executor
) -> tuple[tuple[TileBlock, ...], tuple[TileFragment, ...]]:
    """Compute the digests of tiles that this process holds, and the fragments of tiles that it holds in part.

    Args:
        parts: Boxes of the whole tensor that are not empty, each with its elements: of any strides, on any device.
        shape: The shape of the whole tensor.
        threads: The threads that hash, each a strip of tiles; see `hashing_threads`.
    """
    whole, tile = Box.whole(shape), tile_shape(shape)
    blocks: list[TileBlock] = []
    fragments: list[TileFragment] = []
    for box, values in parts:
        bits = as_bits(values)
        inner, _ = whole_cells(box, whole, tile)
        if inner is not None:
            block = region(bits, inner.relative_to(box.offsets), inner.shape)
            blocks.append(TileBlock(inner, _digests(block, tile, threads)))
        for slab in (box,) if inner is None else box.subtract(inner):
            fragments += [
                TileFragment(cut, bytes(_as_bytes(region(bits, cut.relative_to(box.offsets), cut.shape))))
                for cut in cells(slab, tile)
            ]
    return tuple(blocks), tuple(fragments)


def _digests(block: torch.Tensor, tile: Ints, threads: Executor) -> bytes:
    """The digests of a block that begins at a tile's start, in the order of its grid."""
    shape = tuple(block.shape)
    table = np.empty((*grid_shape(Box.whole(shape), tile), DIGEST_NBYTES), np.uint8)
    dims = [_uniform(size, step) for size, step in zip(shape, tile, strict=True)]
    for corner in product(*dims):  # whole tiles, and separately those that the end of the tensor cuts
        counts = tuple(count for _, count, _ in corner)
        sides = tuple(side for _, _, side in corner)
        starts = tuple(first * step for (first, _, _), step in zip(corner, tile, strict=True))
        view = region(block, starts, tuple(count * side for count, side in zip(counts, sides, strict=True)))
        split = view.view([size for pair in zip(counts, sides, strict=True) for size in pair])
        tiled = split.permute([*range(0, split.ndim, 2), *range(1, split.ndim, 2)])
        found = b"".join(_by_threads(threads, list(_strips(tiled, len(shape))), len(shape)))
        place = tuple(slice(first, first + count) for first, count, _ in corner)
        table[place] = np.frombuffer(found, np.uint8).reshape(*counts, DIGEST_NBYTES)
    return table.tobytes()


def _uniform(size: int, step: int) -> list[tuple[int, int, int]]:
    """A dim as ranges of equal tiles: the first tile, their number, and their length."""
    count, tail = divmod(size, step)
    return [(0, count, step)] * bool(count) + [(count, 1, tail)] * bool(tail)


def _strips(tiled: torch.Tensor, dims: int) -> Iterator[torch.Tensor]:
    """Tiles in bounded numbers; the first ``dims`` dims are their grid."""
    long = next((dim for dim in range(dims) if tiled.shape[dim] > 1), None)
    if long is None or tiled.nbytes <= _STRIP_NBYTES:
        yield tiled
        return
    count = tiled.shape[long]
    step = max(_STRIP_NBYTES * count // tiled.nbytes, 1)
    for start in range(0, count, step):
        yield from _strips(tiled.narrow(long, start, min(step, count - start)), dims)


def _by_threads(threads: Executor, strips: Sequence[torch.Tensor], dims: int) -> Iterable[bytes]:
    if len(strips) == 1:
        return [_of_strip(strips[0], dims)]
    settle(strips)  # the threads have other streams
    return threads.map(_of_strip, strips, repeat(dims))


def _of_strip(strip: torch.Tensor, dims: int) -> bytes:
    data = _as_bytes(strip)
    nbytes = prod(strip.shape[dims:]) * strip.element_size()
    return b"".join(tile_digest(data[start : start + nbytes]) for start in range(0, len(data), nbytes))


def _as_bytes(values: torch.Tensor) -> memoryview:
    """The elements row by row, in the memory of this host."""
    return values.contiguous().cpu().numpy().reshape(-1).view(np.uint8).data


class TileTable:
    """The digests of one tensor's tiles: collected from processes, or certified and compared with those of processes.

    Attributes:
        shape: The shape of the tensor.
        shown: Flags of the tiles that some process has shown to be as in the table; in the shape of the tensor's grid.

    Args:
        shape: The shape of the tensor.
        digests: The digests of all its tiles, if they are certified.
    """

    def __init__(self, shape: Ints, digests: bytes | None = None) -> None:
        self.shape = shape
        self._whole, self._tile = Box.whole(shape), tile_shape(shape)
        grid = grid_shape(self._whole, self._tile)
        self._known = np.full(grid, digests is not None)
        self._digests = np.zeros((*grid, DIGEST_NBYTES), np.uint8)
        if digests is not None:
            self._digests[...] = np.frombuffer(digests, np.uint8).reshape(self._digests.shape)
        self.shown = np.zeros(grid, bool)
        self._cut: dict[Ints, list[TileFragment]] = {}

    @property
    def digests(self) -> bytes:
        """The digests of all tiles, row by row; zeros for unknown ones."""
        return self._digests.tobytes()

    def show(self, blocks: Sequence[TileBlock], fragments: Sequence[TileFragment]) -> list[Box]:
        """Add the tiles of a process. Returns the tiles with other digests in the table."""
        wrong = [box for block in blocks for box in self._show(block)]
        for fragment in fragments:
            at = tuple(start // step for start, step in zip(fragment.box.offsets, self._tile, strict=True))
            self._cut.setdefault(at, []).append(fragment)
        return wrong

    def join(self) -> list[Box]:
        """Join the fragments that make whole tiles. Returns the tiles with other digests in the table."""
        wrong: list[Box] = []
        for at, fragments in list(self._cut.items()):
            box = self._box(at)
            data = joined(box, fragments)
            if data is None:
                continue
            del self._cut[at]
            wrong += self._show(TileBlock(box, tile_digest(data))) if data else [box]
        return wrong

    def fragments(self) -> tuple[TileFragment, ...]:
        """The fragments of tiles that are still incomplete and that no other process has shown."""
        return tuple(fragment for at, fragments in self._cut.items() if not self.shown[at] for fragment in fragments)

    def missing(self) -> Iterator[Box]:
        """The tiles without a known digest."""
        return (self._box(tuple(map(int, at))) for at in np.argwhere(~self._known))

    def mark(self, bits: bytes) -> None:
        """Add the tiles that another table of the same tensor has seen, from its `bits`."""
        flags = np.unpackbits(np.frombuffer(bits, np.uint8), count=self.shown.size)
        self.shown |= flags.astype(bool).reshape(self.shown.shape)

    @property
    def bits(self) -> bytes:
        """The flags of shown tiles, eight per byte."""
        return np.packbits(self.shown).tobytes()

    def _show(self, block: TileBlock) -> list[Box]:
        place: tuple[slice | EllipsisType, ...] = (*grid_slice(block.box, self._whole, self._tile), ...)
        known, kept = self._known[place], self._digests[place]
        came = np.frombuffer(block.digests, np.uint8).reshape(kept.shape)
        differs = known & (kept != came).any(-1)
        kept[~known] = came[~known]
        self.shown[place] |= ~differs
        known[...] = True
        first = tuple(start // step for start, step in zip(block.box.offsets, self._tile, strict=True))
        return [self._box(plus(tuple(map(int, at)), first)) for at in np.argwhere(differs)]

    def _box(self, at: Ints) -> Box:
        offsets = tuple(number * step for number, step in zip(at, self._tile, strict=True))
        rest = minus(self.shape, offsets)
        return Box(offsets, tuple(min(step, left) for step, left in zip(self._tile, rest, strict=True)))


def count_elements(shape: Ints, tiles: NDArray[np.bool_]) -> int:
    """The number of elements in some tiles of a tensor; the tiles are flags in the shape of its grid."""
    weights = tiles.astype(np.int64)
    for dim, (size, step) in enumerate(zip(shape, tile_shape(shape), strict=True)):
        lengths = np.full(tiles.shape[dim], step)
        lengths[-1:] = size - step * (len(lengths) - 1)
        weights = weights * lengths.reshape([-1 if other == dim else 1 for other in range(weights.ndim)])
    return int(weights.sum())


def joined(box: Box, fragments: Sequence[TileFragment]) -> bytes | None:
    """The elements of a tile; None if fragments are missing, and no bytes if they contradict one another."""
    if sum(fragment.box.numel for fragment in fragments) < box.numel:
        return None
    itemsize = len(fragments[0].data) // fragments[0].box.numel
    data = np.zeros((*box.shape, itemsize), np.uint8)
    there = np.zeros(box.shape, bool)
    for fragment in fragments:
        place = tuple(
            slice(start, start + size)
            for start, size in zip(fragment.box.relative_to(box.offsets), fragment.box.shape, strict=True)
        )
        came = np.frombuffer(fragment.data, np.uint8).reshape(*fragment.box.shape, itemsize)
        if (there[place] & (data[place] != came).any(-1)).any():
            return b""
        data[place], there[place] = came, True
    return data.tobytes() if there.all() else None
