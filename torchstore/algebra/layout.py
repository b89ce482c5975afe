"""Where the elements of a sharded tensor are: arithmetic on boxes, nothing else.

A *box* is an axis-parallel block of the global tensor. A rank's local tensor consists of *pieces*: boxes
of the global tensor, each with its place in the local tensor. Most ranks hold one piece;
a strided shard (FSDP over tensor parallelism) may hold several, an empty shard holds none.

This module does no I/O and uses no tensor: shapes in, boxes out. It follows the chunking rule of
``torch.chunk`` (the first chunks have the rounded-up size, the last may be short or empty), which is what
DTensor does; the tests check it against DTensor element by element.

"Axis" is a dimension of the device mesh, "dim" a dimension of the tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

Ints = tuple[int, ...]
_Runs = tuple[tuple[int, int], ...]  # (global start, length) along one dim, in local order


@dataclass(frozen=True, slots=True)
class Shard:
    """Tensor dimension ``dim`` is split into one chunk per coordinate of the mesh axis."""

    dim: int


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every coordinate of the mesh axis holds the same elements."""


@dataclass(frozen=True, slots=True)
class StridedShard:
    """``dim`` is first split into ``split_factor`` parts, then each part into one chunk per coordinate.

    A rank holds its chunk of every part, one after the other. This describes FSDP2 over tensor parallelism: the mesh
    lists the FSDP axis first, although the tensor was split along the other axis first.
    """

    dim: int
    split_factor: int


Placement = Shard | Replicate | StridedShard


@dataclass(frozen=True, slots=True)
class Box:
    """A block of a tensor: ``shape`` elements from ``offsets`` on, both with one number per dim."""

    offsets: Ints
    shape: Ints

    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        """The box that is all of a tensor of this shape."""
        return Box((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """The number of elements in the box; a box of a 0-dim tensor has one."""
        return prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """The intersection of both, or None if they share no element."""
        offsets: list[int] = []
        shape: list[int] = []
        for mine, my_size, theirs, their_size in zip(self.offsets, self.shape, other.offsets, other.shape, strict=True):
            start = mine if mine > theirs else theirs
            size = min(mine + my_size, theirs + their_size) - start
            if size <= 0:
                return None
            offsets.append(start)
            shape.append(size)
        return Box(tuple(offsets), tuple(shape))

    def subtract(self, hole: Box) -> tuple[Box, ...]:
        """This box without ``hole``, which must be inside it, as disjoint boxes."""
        rest: list[Box] = []
        offsets, shape = list(self.offsets), list(self.shape)
        for dim, (start, size) in enumerate(zip(hole.offsets, hole.shape, strict=True)):
            # Cut off the slabs before and after the hole along this dim, then continue in the slab that contains it.
            before, after = start - offsets[dim], offsets[dim] + shape[dim] - (start + size)
            for slab_start, slab_size in ((offsets[dim], before), (start + size, after)):
                if slab_size > 0:
                    rest.append(
                        Box(
                            (*offsets[:dim], slab_start, *offsets[dim + 1 :]),
                            (*shape[:dim], slab_size, *shape[dim + 1 :]),
                        )
                    )
            offsets[dim], shape[dim] = start, size
        return tuple(rest)

    def relative_to(self, origin: Ints) -> Ints:
        """The offsets of this box relative to the point ``origin``."""
        return minus(self.offsets, origin)


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of the global tensor that is at offsets ``local`` in some rank's local tensor."""

    box: Box
    local: Ints


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor of ``global_shape`` is spread over a mesh: one placement for each mesh axis.

    Raises:
        ValueError: The number of placements is not the number of axes, a placement names a dim that the
            tensor does not have, or a size is impossible.
    """

    global_shape: Ints
    mesh_shape: Ints = ()
    placements: tuple[Placement, ...] = ()

    def __post_init__(self) -> None:
        if len(self.mesh_shape) != len(self.placements):
            raise ValueError(f"{len(self.placements)} placements for a mesh of {len(self.mesh_shape)} axes")
        if any(size < 1 for size in self.mesh_shape) or any(size < 0 for size in self.global_shape):
            raise ValueError(f"impossible sizes: tensor {self.global_shape}, mesh {self.mesh_shape}")
        for placement in self.placements:
            if isinstance(placement, Replicate):
                continue
            if not 0 <= placement.dim < len(self.global_shape):
                raise ValueError(f"{placement} on a tensor of {len(self.global_shape)} dims")
            if isinstance(placement, StridedShard) and placement.split_factor < 1:
                raise ValueError(f"{placement}: the split factor must be at least 1")

    def pieces(self, coordinate: Sequence[int]) -> tuple[Piece, ...]:
        """The pieces that the rank at ``coordinate`` of the mesh holds, in the order of its local tensor.

        Returns:
            Disjoint pieces; none when the shard is empty.

        Raises:
            ValueError: The coordinate is not in the mesh.
        """
        return _pieces(self, tuple(coordinate))

    def local_shape(self, coordinate: Sequence[int]) -> Ints:
        """The shape of the local tensor of the rank at ``coordinate``."""
        self._check(tuple(coordinate))
        return tuple(
            sum(length for _, length in _runs(self, dim, tuple(coordinate))) for dim in range(len(self.global_shape))
        )

    def coordinates(self) -> Iterable[Ints]:
        """Every coordinate of the mesh, in row-major order."""
        return product(*(range(size) for size in self.mesh_shape))

    def sharded_axes(self) -> Ints:
        """The mesh axes along which ranks hold different elements."""
        return tuple(
            axis
            for axis, placement in enumerate(self.placements)
            if not isinstance(placement, Replicate) and self.mesh_shape[axis] > 1
        )

    def _check(self, coordinate: Ints) -> None:
        inside = len(coordinate) == len(self.mesh_shape) and all(
            0 <= index < size for index, size in zip(coordinate, self.mesh_shape, strict=True)
        )
        if not inside:
            raise ValueError(f"{coordinate} is not a coordinate of a mesh of shape {self.mesh_shape}")


@lru_cache(maxsize=4096)
def _pieces(layout: Layout, coordinate: Ints) -> tuple[Piece, ...]:
    layout._check(coordinate)
    by_dim: list[list[tuple[int, int, int]]] = []  # per dim: (global start, length, local start)
    for dim in range(len(layout.global_shape)):
        local = 0
        spans: list[tuple[int, int, int]] = []
        for start, length in _runs(layout, dim, coordinate):
            spans.append((start, length, local))
            local += length
        by_dim.append(spans)
    return tuple(
        Piece(
            Box(tuple(start for start, _, _ in spans), tuple(length for _, length, _ in spans)),
            tuple(local for _, _, local in spans),
        )
        for spans in product(*by_dim)
    )


def _runs(layout: Layout, dim: int, coordinate: Ints) -> _Runs:
    """The ranges of dim ``dim`` that the rank holds: axes are applied from left to right."""
    runs: _Runs = ((0, layout.global_shape[dim]),) if layout.global_shape[dim] else ()
    for axis, placement in enumerate(layout.placements):
        if isinstance(placement, Replicate) or placement.dim != dim:
            continue
        length = sum(size for _, size in runs)
        parts = placement.split_factor if isinstance(placement, StridedShard) else 1
        picked: list[tuple[int, int]] = []
        for part in range(parts):
            first, last = _chunk(length, parts, part)
            start, stop = _chunk(last - first, layout.mesh_shape[axis], coordinate[axis])
            picked.extend(_cut(runs, first + start, first + stop))
        runs = _merge(picked)
    return runs


def _chunk(length: int, parts: int, index: int) -> tuple[int, int]:
    """Start and stop of chunk ``index`` when ``length`` is split like in torch.chunk."""
    size = -(-length // parts)
    return min(index * size, length), min((index + 1) * size, length)


def _cut(runs: _Runs, start: int, stop: int) -> Iterable[tuple[int, int]]:
    """The part from ``start`` to ``stop`` of the concatenated runs."""
    position = 0
    for run_start, length in runs:
        first, last = max(start - position, 0), min(stop - position, length)
        if first < last:
            yield run_start + first, last - first
        position += length


def _merge(runs: Iterable[tuple[int, int]]) -> _Runs:
    """Merge neighbours that follow each other in the tensor."""
    merged: list[tuple[int, int]] = []
    for start, length in runs:
        if merged and sum(merged[-1]) == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        else:
            merged.append((start, length))
    return tuple(merged)


def plus(left: Ints, right: Ints) -> Ints:
    """The sum of two tuples, dim by dim."""
    return tuple(a + b for a, b in zip(left, right, strict=True))


def minus(left: Ints, right: Ints) -> Ints:
    """The difference of two tuples, dim by dim."""
    return tuple(a - b for a, b in zip(left, right, strict=True))


@lru_cache(maxsize=4096)
def uncovered(global_shape: Ints, boxes: frozenset[Box]) -> tuple[Box, ...]:
    """The part of a tensor outside of all ``boxes``; it is empty if and only if they cover the tensor."""
    whole = Box.whole(global_shape)
    missing: tuple[Box, ...] = (whole,) if whole.numel else ()
    for box in sorted(boxes, key=lambda box: box.offsets):
        if not missing:
            break
        left: list[Box] = []
        for part in missing:
            common = part.intersect(box)
            left.extend((part,) if common is None else part.subtract(common))
        missing = tuple(left)
    return missing


def contiguous_strides(shape: Sequence[int]) -> Ints:
    """Row-major strides in elements."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
