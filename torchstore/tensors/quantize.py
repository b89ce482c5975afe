"""Block-FP8: weights travel as 8-bit floats with one float32 scale for each block of a matrix.

The format is that of DeepSeek's checkpoints, which vLLM and SGLang load: ``weight`` in ``float8_e4m3fn`` and beside it
``weight_scale_inv`` with the largest magnitude of each 128 x 128 block divided by 448, the largest number of that
dtype; a value is its 8 bits times the scale of its block. The publisher quantizes while it stages. A reader takes both
tensors as they are, or gives a tensor of a wider dtype and gets the values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from skipper.torchstore.algebra.layout import Box, Ints, Piece
from skipper.torchstore.algebra.manifest import TensorItem
from skipper.torchstore.errors import BlockAlignmentError
from skipper.torchstore.tensors.cells import region
from skipper.torchstore.tensors.local_tensors import LocalTensor, check_destination
from skipper.torchstore.tensors.values import dtype_named
from skipper.torchstore.tensors.written import writing_mode

SCALE_SUFFIX = "_scale_inv"

_STRIP = 1 << 20  # elements that are converted to float32 at a time

_MOST = 1 << 16
"""The most rows or columns of a block: tensors are padded to whole blocks."""


@dataclass(frozen=True, slots=True)
class BlockFP8:
    """``put_state_dict(transfer_dtype=BlockFP8())``: matrices travel as 8-bit floats with a scale for each block.

    Attributes:
        block: Rows and columns that share a scale. The shards of the publishers must consist of whole blocks.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        select: Says by name which of the floating-point matrices are quantized; None: all. Checkpoints of this format
            leave embeddings and the output layer as they are. Give the same function every time.

    Raises:
        ValueError: Another dtype, or sizes that are not positive.
    """

    block: tuple[int, int] = (128, 128)
    dtype: torch.dtype = torch.float8_e4m3fn
    select: Callable[[str], bool] | None = None

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
            raise ValueError(f"transfer_dtype: blocks are float8_e4m3fn or float8_e5m2, not {self.dtype}")
        if len(self.block) != 2 or any(not isinstance(size, int) or not 0 < size <= _MOST for size in self.block):
            raise ValueError(
                f"transfer_dtype: a block has a positive number of rows and columns, at most {_MOST}, not {self.block}"
            )

    def takes(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether a tensor of this name is quantized."""
        wide = tensor.is_floating_point() and tensor.element_size() > 1
        return wide and tensor.ndim == 2 and (self.select is None or self.select(name))


@dataclass(frozen=True, slots=True)
class Scales:
    """The scales of one quantized tensor of a publisher.

    Attributes:
        name: Under which they are stored.
        block: Rows and columns that share one.
        local: Those of this process.
    """

    name: str
    block: Ints
    local: LocalTensor


def scales_of(local: LocalTensor, block: Ints, *, key: str) -> LocalTensor:
    """Room for the scales of the blocks that a process holds of a matrix.

    Raises:
        BlockAlignmentError: A block lies partly in this process: its scale would depend on another one's elements.
    """
    for piece in local.pieces:
        if any(
            start % step or ((start + size) % step and start + size != whole)
            for start, size, step, whole in zip(
                piece.box.offsets, piece.box.shape, block, local.global_shape, strict=True
            )
        ):
            raise BlockAlignmentError(key, block, piece.box.offsets, piece.box.shape)
    pieces = tuple(
        Piece(Box(_down(piece.box.offsets, block), _up(piece.box.shape, block)), _down(piece.local, block))
        for piece in local.pieces
    )
    shape = _up(tuple(local.tensor.shape), block)
    room = torch.empty(shape, dtype=torch.float32, device=local.tensor.device)
    return LocalTensor(room, _up(local.global_shape, block), pieces, local.layout, local.coordinate)


def quantize(values: torch.Tensor, out: torch.Tensor, scales: torch.Tensor, block: Ints) -> None:
    """Quantize a matrix whose first element begins a block.

    A scale is the block's largest magnitude divided by the largest number of the dtype, and 1 for a block of zeros.
    With ``float8_e4m3fn`` what comes back differs from a value x by at most max(abs(x) / 16, scale / 1024), save for
    the rounding of float32. A block with an infinity or a NaN comes back without finite values that mean anything.

    Args:
        values: Of any floating-point dtype and strides.
        out: Of the same shape; its dtype is what values become.
        scales: float32, one for each block.
        block: Its rows and columns.
    """
    largest = torch.finfo(out.dtype).max
    for rows, line in _strips(values.shape, block, _STRIP):
        blocks, shape = _in_blocks(values[rows].float(), block)
        # Rows first: to reduce whole rows runs at the speed of memory.
        peaks = blocks.abs().amax(1).amax(-1)
        scales[line] = scale = torch.where(peaks == 0, 1.0, peaks / largest)
        out[rows] = (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1)[: shape[0], : shape[1]].to(out.dtype)


def dequantize(values: torch.Tensor, scales: torch.Tensor, block: Ints, start: Ints, out: torch.Tensor) -> None:
    """The values of a matrix that begins ``start`` elements within the first of its blocks."""
    for rows, line in _strips(values.shape, block, _STRIP, start[0]):
        strip, scale = values[rows].float(), scales[line]
        first = (start[0] if rows.start == 0 else 0, start[1])
        if any(first):
            spread = scale.repeat_interleave(block[0], 0)[first[0] :][: strip.shape[0]]
            out[rows] = strip.mul_(spread.repeat_interleave(block[1], 1)[:, first[1] :][:, : strip.shape[1]])
        else:
            blocks, shape = _in_blocks(strip, block)
            blocks *= scale[:, None, :, None]
            out[rows] = blocks.flatten(2).flatten(0, 1)[: shape[0], : shape[1]]


def _strips(shape: Ints, block: Ints, limit: int, start: int = 0) -> Iterator[tuple[slice, slice]]:
    """Rows in bounded numbers of whole lines of blocks, with the lines of scales that belong to them."""
    height, width = shape
    step = block[0] * max(limit // max(block[0] * width, 1), 1)
    for begin in range(0, start + height, step):
        stop = min(begin + step, start + height)
        if stop > max(begin, start):
            yield slice(max(begin - start, 0), stop - start), slice(begin // block[0], -(-stop // block[0]))


def _in_blocks(matrix: torch.Tensor, block: Ints) -> tuple[torch.Tensor, tuple[int, int]]:
    """A matrix, filled up with zeros to whole blocks, as (block row, row, block column, column); its own shape."""
    rows, columns = matrix.shape
    if rows % block[0] or columns % block[1]:
        matrix = torch.nn.functional.pad(matrix, (0, -columns % block[1], 0, -rows % block[0]))
    blocks = matrix.reshape(matrix.shape[0] // block[0], block[0], matrix.shape[1] // block[1], block[1])
    return blocks, (rows, columns)


@dataclass(frozen=True, slots=True)
class Landing:
    """Where quantized bytes arrive before they become values of a reader's tensor.

    Its boundaries may cut blocks: the scales of all blocks that it touches are read.

    Attributes:
        values: In the place of the reader's own tensor.
        scales: In the place of the tensor of the scales.
        block: Rows and columns that share one.
    """

    into: LocalTensor
    values: LocalTensor
    scales: LocalTensor
    block: Ints

    @staticmethod
    def of(into: LocalTensor, item: TensorItem) -> Landing:
        """Room for what a tensor needs of a quantized item."""
        device = into.tensor.device
        values = torch.empty(into.tensor.shape, dtype=dtype_named(item.dtype), device=device)
        pieces: list[Piece] = []
        rows = columns = 0
        for piece in into.pieces:
            stop = tuple(start + size for start, size in zip(piece.box.offsets, piece.box.shape, strict=True))
            first = _down(piece.box.offsets, item.block)
            box = Box(first, tuple(b - a for a, b in zip(first, _up(stop, item.block), strict=True)))
            pieces.append(Piece(box, (rows, 0)))  # one below the other: neighbours may need the same scale
            rows, columns = rows + box.shape[0], max(columns, box.shape[1])
        scales = torch.empty((rows, columns), dtype=torch.float32, device=device)
        return Landing(
            into,
            LocalTensor(values, into.global_shape, into.pieces),
            LocalTensor(scales, _up(into.global_shape, item.block), tuple(pieces)),
            item.block,
        )

    def fits(self, into: LocalTensor, item: TensorItem) -> bool:
        """Whether it is what this same tensor needs of a quantized item."""
        boxes = (self.into.global_shape, self.into.pieces) == (into.global_shape, into.pieces)
        return boxes and self.block == item.block and str(self.values.tensor.dtype) == item.dtype

    def finish(self) -> None:
        """Everything has arrived: write the values."""
        with writing_mode(self.into.tensor):
            for piece, lines in zip(self.into.pieces, self.scales.pieces, strict=True):
                start = tuple(at % step for at, step in zip(piece.box.offsets, self.block, strict=True))
                dequantize(
                    region(self.values.tensor, piece.local, piece.box.shape),
                    region(self.scales.tensor, lines.local, lines.box.shape),
                    self.block,
                    start,
                    region(self.into.tensor, piece.local, piece.box.shape),
                )


def land(
    key: str,
    targets: Mapping[str, LocalTensor],
    names: Mapping[str, str],
    items: Mapping[str, TensorItem],
    earlier: Mapping[str, Landing],
) -> tuple[dict[str, LocalTensor], dict[str, str], dict[str, Landing]]:
    """Put landings in the place of those targets that want the values of quantized tensors.

    ``names`` has the stored names of labels that are none themselves, ``earlier`` the landings of the same targets from
    an earlier read, to be used again.

    Returns:
        What is to be read, the stored names of its labels, and by label what makes values of it.

    Raises:
        LayoutMismatchError: A target cannot be written to.
    """
    into, stored, landings = dict(targets), dict(names), {}
    for label, target in targets.items():
        item = items.get(names.get(label, label))
        if item is None or not lands(item, target.tensor.dtype):
            continue
        check_destination(target.tensor, f"{key}/{label}")
        known = earlier.get(label)
        landing = landings[label] = known if known and known.fits(target, item) else Landing.of(target, item)
        beside = f"{label} (scales)"
        into[label], into[beside], stored[beside] = landing.values, landing.scales, item.scales
    return into, stored, landings


def lands(item: TensorItem, dtype: torch.dtype) -> bool:
    """Whether a tensor of this dtype takes the values of a quantized item instead of its bytes."""
    return bool(item.scales) and dtype.is_floating_point and dtype.itemsize > 1


def _down(numbers: Ints, block: Ints) -> Ints:
    return tuple(number // step for number, step in zip(numbers, block, strict=True))


def _up(numbers: Ints, block: Ints) -> Ints:
    return tuple(-(-number // step) for number, step in zip(numbers, block, strict=True))
