"""The grid for checksums and comparisons of a tensor's bytes: cells of some thousand elements.

The grid belongs to the whole tensor, not to a shard: two processes that hold overlapping parts of one tensor cut their
parts at the same places, so one process can verify the other's checksum of a cell. A cell that the edge of a shard cuts
is a smaller cell of that shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate, product

import torch

from skipper.torchstore.algebra.layout import Box, Ints

_CELL = 4096
"""Elements of a cell: a checksum of 8 bytes is then 1/1024 of bfloat16 weights."""

_SIDE = 64  # for a cell of a tensor with several dims: layouts cut weights at multiples of it
_WORD = 8
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""By the size of an element, dtypes that torch can copy and numpy has (float8 and others are not in numpy)."""


def cell_shape(shape: Ints, limit: int = _CELL) -> Ints:
    """The shape of the cells of a tensor: up to ``limit`` elements, the last dims first.

    ``limit`` is a multiple of 8, so that cells end where 64-bit words do.
    """
    side = min(_SIDE, limit) if len(shape) > 1 else limit
    cell: list[int] = []
    for size in reversed(shape):
        cell.append(max(min(size, side, limit), 1))
        limit = max(limit // cell[-1], 1)
    return tuple(reversed(cell))


def spans(start: int, size: int, step: int) -> tuple[int, int, int]:
    """How the grid cuts a range of one dim.

    Returns:
        The length of the cut cell before the first whole one, the number of whole cells, and the length of the cut cell
        after them.
    """
    head = min(-start % step, size)
    whole, tail = divmod(size - head, step)
    return head, whole, tail


def grid_shape(box: Box, cell: Ints) -> Ints:
    """The number of cells, including cut ones, of a box along each dim."""
    counts = []
    for start, size, step in zip(box.offsets, box.shape, cell, strict=True):
        head, whole, tail = spans(start, size, step)
        counts.append(bool(head) + whole + bool(tail))
    return tuple(counts)


def cells(box: Box, cell: Ints) -> Iterator[Box]:
    """The cells of a box in row-major order."""
    for corner in product(*(_cuts(*line) for line in zip(box.offsets, box.shape, cell, strict=True))):
        yield Box(tuple(start for start, _ in corner), tuple(size for _, size in corner))


def whole_cells(part: Box, box: Box, cell: Ints) -> tuple[Box | None, Box]:
    """The cells of ``box`` inside a part of it, and the cells that the part touches.

    Returns:
        The block of the cells that are completely in ``part`` (None if there is none), and the block of all that share
        an element with it.
    """
    inner: list[tuple[int, int]] = []
    outer: list[tuple[int, int]] = []
    for start, size, low, length, step in zip(part.offsets, part.shape, box.offsets, box.shape, cell, strict=True):
        stop, high = start + size, low + length
        first = start if start == low else -(-start // step) * step
        last = stop if stop == high else stop // step * step
        inner.append((first, last - first))
        before = max(start // step * step, low)
        after = min(-(-stop // step) * step, high)
        outer.append((before, after - before))
    touched = Box(tuple(start for start, _ in outer), tuple(size for _, size in outer))
    if any(size <= 0 for _, size in inner):
        return None, touched
    return Box(tuple(start for start, _ in inner), tuple(size for _, size in inner)), touched


def grid_slice(part: Box, box: Box, cell: Ints) -> tuple[slice, ...]:
    """The position of the cells of an aligned part of a box in the box' grid."""
    found = []
    for start, size, low, step in zip(part.offsets, part.shape, box.offsets, cell, strict=True):
        first = start // step - low // step
        found.append(slice(first, (start + size - 1) // step - low // step + 1))
    return tuple(found)


def region(tensor: torch.Tensor, offsets: Ints, shape: Ints) -> torch.Tensor:
    """The view of a block of a tensor."""
    return tensor[tuple(slice(start, start + size) for start, size in zip(offsets, shape, strict=True))]


def cell_sums(block: torch.Tensor, offsets: Ints, cell: Ints) -> torch.Tensor:
    """The checksum of each cell: the sum of its bytes as 64-bit words, modulo 2**64.

    A wrong bit, a mixture of two versions or a misplaced cell changes a checksum. Swapped words in the same column of a
    cell do not.

    Args:
        block: A block of any strides, dtype and device.
        offsets: The offsets of the block in the whole tensor: they determine where the grid cuts it.
        cell: The shape of a cell, from `cell_shape`.

    Returns:
        int64, one element for each cell, in the shape of `grid_shape`, on the block's device.
    """
    return _over_cells((block,), offsets, cell, lambda words: words, torch.sum)


def cells_differ(left: torch.Tensor, right: torch.Tensor, offsets: Ints, cell: Ints) -> torch.Tensor:
    """Which cells of two blocks of one shape and dtype differ in any bit.

    Returns:
        bool, in the shape of `grid_shape`.
    """
    return _over_cells((left, right), offsets, cell, torch.ne, torch.any)


def _over_cells(
    blocks: tuple[torch.Tensor, ...],
    offsets: Ints,
    cell: Ints,
    combine: Callable[..., torch.Tensor],
    reduce: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """Combine the words of blocks of one shape, and reduce each cell to one element."""
    shape = blocks[0].shape
    if not shape:
        return reduce(combine(*(_words(block.reshape(1)) for block in blocks)))
    reduced = []
    head, whole, tail = spans(offsets[-1], shape[-1], cell[-1])
    start = 0
    for count, width in ((int(head > 0), head), (whole, cell[-1]), (int(tail > 0), tail)):
        if count:
            words = combine(*(_words(block.narrow(-1, start, count * width)) for block in blocks))
            # Rows first: reducing whole rows runs at the speed of memory, reducing within short rows does not.
            for dim in reversed(range(len(shape) - 1)):
                words = _along(words, dim, offsets[dim], cell[dim], reduce)
            reduced.append(reduce(words.view(*words.shape[:-1], count, -1), -1))
            start += count * width
    return torch.cat(reduced, -1) if len(reduced) > 1 else reduced[0]


def as_bits(values: torch.Tensor) -> torch.Tensor:
    """The same memory in a dtype that torch copies and compares bit for bit."""
    return values.detach().view(_BITS[values.element_size()])


def _words(block: torch.Tensor) -> torch.Tensor:
    """A block as 64-bit words along its last dim, padded with zeros to whole words; a view if that is possible."""
    block = as_bits(block)
    nbytes = block.shape[-1] * block.element_size()
    if nbytes % _WORD:
        padded = block.new_zeros((*block.shape[:-1], -(-nbytes // _WORD) * _WORD), dtype=torch.uint8)
        padded[..., :nbytes] = block.clone(memory_format=torch.contiguous_format).view(torch.uint8)
        return padded.view(torch.int64)
    jumps = (block.storage_offset(), *block.stride()[:-1])
    if block.stride(-1) != 1 or any(jump * block.element_size() % _WORD for jump in jumps):
        block = block.clone(memory_format=torch.contiguous_format)
    return block.view(torch.int64)


def _along(block: torch.Tensor, dim: int, offset: int, step: int, reduce: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Reduce the ranges into which the grid cuts one dim to one element each."""
    if step == 1:
        return block
    head, whole, tail = spans(offset, block.shape[dim], step)
    parts = []
    if head:
        parts.append(reduce(block.narrow(dim, 0, head), dim).unsqueeze(dim))
    if whole:
        middle = block.narrow(dim, head, whole * step)
        parts.append(reduce(middle.view(*middle.shape[:dim], whole, step, *middle.shape[dim + 1 :]), dim + 1))
    if tail:
        parts.append(reduce(block.narrow(dim, block.shape[dim] - tail, tail), dim).unsqueeze(dim))
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]


def _cuts(start: int, size: int, step: int) -> list[tuple[int, int]]:
    """The ranges of one dim, as start and length in the whole tensor."""
    head, whole, tail = spans(start, size, step)
    lengths = [head] * bool(head) + [step] * whole + [tail] * bool(tail)
    return list(zip(accumulate(lengths, initial=start), lengths, strict=False))
