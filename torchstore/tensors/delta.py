"""Lossless deltas: the changes from one version to the next.

Before the publisher writes a version, it compares its tensors, cell by cell, with the copy of the last one in the
volume (`torchstore.clients.snapshot_put`). It publishes the list of changed cells with the version. A reader whose
tensors hold the version before reads only these cells (`torchstore.clients.delta_read`). Each publication that can be a
base has a unique *stamp*, so that another version of the same number, from before a delete or a rollback, is not
confused with it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from math import prod

import numpy as np
import numpy.typing as npt
import torch

from skipper.dataplane import RDMAAction, RDMABuffer
from skipper.torchstore.algebra.layout import Box, Ints, Piece
from skipper.torchstore.algebra.manifest import TensorItem
from skipper.torchstore.errors import StoreError
from skipper.torchstore.tensors.cells import cell_shape, cells_differ, region
from skipper.torchstore.tensors.local_tensors import LocalTensor

Flags = npt.NDArray[np.bool_]

_STRIP = 16 << 20  # bytes of the last version that are compared at a time


@torch.no_grad()
def changed_cells(
    items: Mapping[str, TensorItem], tensors: Mapping[str, LocalTensor], last: RDMABuffer, timeout: float
) -> tuple[torch.Tensor, int]:
    """Compare tensors with their copies in an arena.

    Args:
        items: The items of the manifest, which is also that of the arena.
        tensors: The memory of each item.
        last: The arena. It is read strip by strip into a buffer of bounded size.
        timeout: Timeout of each read, in seconds.

    Returns:
        bool, one element for each cell, by item, piece and cell; and a lower bound of the bytes of unchanged cells.

    Raises:
        DataplaneError: The arena cannot be read.
    """
    flags = [torch.zeros(0, dtype=torch.bool, device="cpu")]
    same = 0
    for name, item in items.items():
        cell = cell_shape(item.global_shape)
        for piece in item.pieces:
            for strip in _strips(piece, cell, item.itemsize):
                here = region(tensors[name].tensor, strip.local, strip.box.shape)
                there = torch.empty(strip.box.shape, dtype=here.dtype, device="cpu")
                action = RDMAAction().read_remote(there, last, layout=item.block_at(strip.local, strip.box.shape))
                action.submit(timeout).get(timeout)
                differing = cells_differ(here.cpu(), there, strip.box.offsets, cell).reshape(-1)
                changed = int(differing.sum()) * prod(cell) * item.itemsize
                same += max(there.nbytes - changed, 0)
                flags.append(differing)
    return torch.cat(flags), same


def pack_flags(flags: torch.Tensor) -> bytes:
    """One bit for each cell, compressed: versions that change little have long runs of zeros."""
    return zlib.compress(np.packbits(flags.numpy()).tobytes(), 1)


def unpack_flags(packed: bytes, count: int) -> Flags:
    """The inverse of `pack_flags`; never decompresses more than ``count`` cells need.

    Raises:
        StoreError: They are not the flags of that many cells.
    """
    nbytes = -(-count // 8)
    try:
        raw = zlib.decompressobj().decompress(packed, nbytes + 1)  # 0 would mean no limit
    except zlib.error as error:
        raise StoreError(f"the list of the cells that a version changes is damaged: {error}") from error
    if len(raw) != nbytes:
        raise StoreError(f"the list of the cells that a version changes is not one of {count} cells")
    bits = np.frombuffer(raw, dtype=np.uint8)
    return np.unpackbits(bits, count=count).astype(np.bool_)


def _strips(piece: Piece, cell: Ints, itemsize: int) -> Iterator[Piece]:
    """A piece in parts of bounded size, each with whole rows of cells."""
    box = piece.box
    if not box.shape:
        yield piece
        return
    step = max(_STRIP // max(prod(box.shape[1:]) * itemsize * cell[0], 1), 1) * cell[0]
    start, end = box.offsets[0], box.offsets[0] + box.shape[0]
    while start < end:
        stop = min((start // step + 1) * step, end)
        yield Piece(
            Box((start, *box.offsets[1:]), (stop - start, *box.shape[1:])),
            (piece.local[0] + start - box.offsets[0], *piece.local[1:]),
        )
        start = stop
