"""Boxes to rows: a strided copy, compiled to the form that rows.h executes. Pure, no I/O.

All strides are in bytes. A row describes both sides of a copy at once; neighbouring dimensions are merged where both
sides allow it, so that a contiguous box of any shape is one run.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from skipper.dataplane._copy import MAX_DIMS, ROW_WORDS

Rows = NDArray[np.int64]
Row = list[int]

_HEAD = 5  # local, remote, run, key, ndim
_LOCAL, _REMOTE, _RUN, _KEY, _NDIM = range(_HEAD)


@dataclass(frozen=True, slots=True)
class RemoteLayout:
    """An N-dimensional strided box inside a remote buffer.

    Attributes:
        offset: Bytes from the start of the buffer to element (0, ..., 0).
        shape: Elements per dimension; must equal that of the local side.
        strides: Bytes from one element to the next, per dimension.
        itemsize: Bytes of an element; must equal that of the local side.

    Example:
        ```python
        import numpy as np

        from skipper.dataplane import RDMAAction, RDMABuffer, RemoteLayout

        full = np.arange(24, dtype=np.float32).reshape(4, 6)
        buffer = RDMABuffer(full)
        box = RemoteLayout(offset=(1 * 6 + 2) * 4, shape=(2, 3), strides=(6 * 4, 4), itemsize=4)
        mine = np.empty((2, 3), np.float32)
        RDMAAction().read_remote(mine, buffer, layout=box).submit().get()
        assert (mine == full[1:3, 2:5]).all()
        ```
    """

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int


def extent(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[int, int]:
    """The bytes [low, high) that a box touches, relative to its element (0, ..., 0)."""
    low, high = 0, itemsize
    for count, stride in zip(shape, strides, strict=True):
        reach = (count - 1) * stride
        if reach < 0:
            low += reach
        else:
            high += reach
    return low, high


def overlaps_itself(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Whether two elements of the box may share bytes.

    Exact for every layout that slicing and transposing make; a layout whose dimensions interleave without touching
    (only `as_strided` makes them) also counts as overlapping.
    """
    reach = itemsize
    for stride, count in sorted((abs(s), n) for s, n in zip(strides, shape, strict=True) if n != 1):
        if stride < reach:
            return True
        reach += (count - 1) * stride
    return False


def compile_box(
    local: int,
    local_strides: Sequence[int],
    remote: int,
    remote_strides: Sequence[int],
    shape: Sequence[int],
    itemsize: int,
    *,
    key: int,
) -> list[Row]:
    """Rows that copy one box; more than one only if more than six dimensions stay unmerged.

    Args:
        local: Address of element (0, ..., 0) on this side.
        local_strides: Bytes, per dimension.
        remote: The same on the other side.
        remote_strides: Bytes, per dimension.
        shape: Elements per dimension, all positive.
        itemsize: Bytes of an element.
        key: Which remote registration `remote` is in.
    """
    # The order in which a copy visits its elements is free. With the widest remote stride outermost, transposed views
    # of the same memory merge like plain ones.
    dims = sorted(
        ((abs(r), abs(s), n, s, r) for n, s, r in zip(shape, local_strides, remote_strides, strict=True) if n != 1),
        reverse=True,
    )
    run = itemsize
    outer: list[tuple[int, int, int]] = []
    for _, _, count, local_stride, remote_stride in reversed(dims):
        if not outer and local_stride == remote_stride == run:
            run *= count
        elif outer and _continues(outer[-1], local_stride, remote_stride):
            outer[-1] = (outer[-1][0] * count, outer[-1][1], outer[-1][2])
        else:
            outer.append((count, local_stride, remote_stride))
    outer.reverse()
    return _unroll(local, remote, run, key, outer)


def _continues(inner: tuple[int, int, int], local_stride: int, remote_stride: int) -> bool:
    count, inner_local, inner_remote = inner
    return local_stride == count * inner_local and remote_stride == count * inner_remote


def _unroll(local: int, remote: int, run: int, key: int, dims: list[tuple[int, int, int]]) -> list[Row]:
    if len(dims) <= MAX_DIMS:
        flat = [value for dim in dims for value in dim]
        return [[local, remote, run, key, len(dims), *flat, *[0] * (ROW_WORDS - _HEAD - len(flat))]]
    count, local_stride, remote_stride = dims[0]
    rows: list[Row] = []
    for i in range(count):
        rows += _unroll(local + i * local_stride, remote + i * remote_stride, run, key, dims[1:])
    return rows


def single(local: int, remote: int, nbytes: int) -> Rows:
    """One contiguous copy within the first registration."""
    return np.array([[local, remote, nbytes, *[0] * (ROW_WORDS - _RUN - 1)]], dtype=np.int64)


def as_rows(rows: list[Row]) -> Rows:
    """One array of many rows, with runs that continue each other on both sides joined."""
    table = np.array(rows, dtype=np.int64).reshape(-1, ROW_WORDS)
    if len(table) < 2:
        return table
    table = table[np.lexsort((table[:, _LOCAL], table[:, _KEY]))]
    previous, following = table[:-1], table[1:]
    joins = (
        (previous[:, _NDIM] == 0)
        & (following[:, _NDIM] == 0)
        & (previous[:, _KEY] == following[:, _KEY])
        & (previous[:, _LOCAL] + previous[:, _RUN] == following[:, _LOCAL])
        & (previous[:, _REMOTE] + previous[:, _RUN] == following[:, _REMOTE])
    )
    starts = np.flatnonzero(np.concatenate(([True], ~joins)))
    joined = table[starts]
    joined[:, _RUN] = np.add.reduceat(table[:, _RUN], starts)
    return np.ascontiguousarray(joined)


def with_keys(rows: Rows, keys: Sequence[int]) -> Rows:
    """Rows with `keys[key]` in place of each key; the same array if that changes nothing."""
    replaced = np.array(keys, dtype=np.int64)[rows[:, _KEY]]
    if (replaced == rows[:, _KEY]).all():
        return rows
    changed = rows.copy()
    changed[:, _KEY] = replaced
    return changed


def runs_of(row: Row) -> tuple[int, int, list[int], list[int], list[int]]:
    """A row taken apart: (key, run, counts, local strides, remote strides)."""
    dims = row[_HEAD : _HEAD + 3 * row[_NDIM]]
    return row[_KEY], row[_RUN], dims[0::3], dims[1::3], dims[2::3]


def has_dims(rows: Rows) -> bool:
    """Whether any row has more than one run."""
    return bool(rows[:, _NDIM].any())


def row_runs(rows: Rows) -> NDArray[np.int64]:
    """Contiguous runs of each row."""
    runs = np.ones(len(rows), dtype=np.int64)
    for dim in range(MAX_DIMS):
        runs *= np.where(rows[:, _NDIM] > dim, rows[:, _HEAD + 3 * dim], 1)
    return runs


def row_bytes(rows: Rows) -> NDArray[np.int64]:
    """Bytes that each row moves."""
    nbytes: NDArray[np.int64] = row_runs(rows) * rows[:, _RUN]
    return nbytes


def stripes(rows: Rows, count: int, *, align: int = 4096) -> list[Rows]:
    """Split rows into at most `count` parts of about equal bytes, for as many threads.

    Args:
        rows: As from `as_rows`.
        count: Parts wanted.
        align: Runs are cut at multiples of this many bytes.
    """
    nbytes = row_bytes(rows)
    share = -(-int(nbytes.sum()) // count)
    if count == 1 or share < align:
        return [rows]
    # Only a row larger than a share has to be cut, and there are at most `count` of those.
    large = nbytes > share
    if large.any():
        pieces = [piece for row in rows[large].tolist() for piece in _cut(row, share, align)]
        rows = np.concatenate((rows[~large], np.array(pieces, dtype=np.int64).reshape(-1, ROW_WORDS)))
        nbytes = row_bytes(rows)
    ends = np.cumsum(nbytes)
    part_of = np.minimum((ends - nbytes // 2) // share, count - 1)  # never decreases: each part is a slice
    begins = np.searchsorted(part_of, np.arange(1, count))
    return [np.ascontiguousarray(part) for part in np.split(rows, begins) if len(part)]


def single_stripes(local: int, remote: int, nbytes: int, *, step: int) -> list[Rows]:
    """One contiguous copy within the first registration, in parts of at most `step` bytes."""
    return [single(local + at, remote + at, min(step, nbytes - at)) for at in range(0, nbytes, step)]


def _cut(row: Row, share: int, align: int) -> list[Row]:
    """One row as several of at most about `share` bytes, along its run or its outermost dimension."""
    local, remote, run, key, ndim = row[:_HEAD]
    if ndim == 0:
        step = max(align, -(-share // align) * align)
        return [
            [local + begin, remote + begin, min(step, run - begin), key, *row[_NDIM:]] for begin in range(0, run, step)
        ]
    count, local_stride, remote_stride = row[_HEAD : _HEAD + 3]
    total = run
    for dim in range(ndim):
        total *= row[_HEAD + 3 * dim]
    step = max(1, share // (total // count))
    pieces: list[Row] = []
    for begin in range(0, count, step):
        piece = [local + begin * local_stride, remote + begin * remote_stride, *row[_RUN:]]
        piece[_HEAD] = min(step, count - begin)
        pieces.append(piece)
    return pieces
