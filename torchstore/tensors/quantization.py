"""Matrices that are sent as small elements with a scale for each block.

A `Quantization` is one format. It defines how values become elements and scales, and how these become values again. The
rest is the same for every format and is done here: the iteration over the blocks, and a publisher's buffers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from skipper.torchstore.algebra.layout import Box, Ints, Layout, Piece, Replicate
from skipper.torchstore.algebra.manifest import BlockScaled
from skipper.torchstore.errors import BlockAlignmentError, LayoutMismatchError
from skipper.torchstore.tensors.local_tensors import LocalTensor
from skipper.torchstore.tensors.values import as_bytes

_STRIP = 1 << 20  # elements that are converted to float32 at a time


class Quantization(ABC):
    """One format; a publisher gives an instance as ``transfer_dtype``.

    The first three methods make elements and scales. The last two do the reverse and do not depend on the publisher's
    options: a reader calls them on the class that `format` names.

    Attributes:
        format: Its name in manifests.
        packed: The number of values in one stored element, along the last dim.
        scale_suffix: The scales of "w" are stored as "w" plus this suffix.
        tensor_suffix: The same for the scale of the whole tensor; "" if the format has none.
    """

    __slots__ = ()

    format: ClassVar[str]
    packed: ClassVar[int] = 1
    scale_suffix: ClassVar[str]
    tensor_suffix: ClassVar[str] = ""

    @property
    @abstractmethod
    def block(self) -> Ints:
        """Rows and columns that share a scale."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype of the stored elements."""

    @property
    @abstractmethod
    def scale_dtype(self) -> torch.dtype:
        """The dtype of the stored scales."""

    @property
    @abstractmethod
    def select(self) -> Callable[[str], bool] | None:
        """Selects by name the matrices that are quantized; None: all."""

    @property
    def experts(self) -> Callable[[str], bool] | None:
        """Selects by name the tensors of three dims that are stacks of matrices, and quantized; None: none."""
        return None

    def takes(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether a tensor of this name is quantized."""
        if not tensor.is_floating_point() or tensor.element_size() == 1:
            return False
        if tensor.ndim == 3:
            return self.experts is not None and self.experts(name)
        return tensor.ndim == 2 and (self.select is None or self.select(name))

    def block_in(self, dims: int) -> Ints:
        """The shape of a block in a tensor with this many dims; in a stack, a block is in one matrix."""
        return (1,) * (dims - 2) + self.block

    def knows_peak(self, name: str) -> bool:
        """Whether a process with only a part of a matrix can compute the scale of the whole matrix."""
        return not self.tensor_suffix

    def tensor_scale(
        self, name: str, values: torch.Tensor, matrices: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """The scale of a whole matrix, float32 without dims; None if the format has none.

        For a stack, one scale for each matrix; ``matrices`` are the numbers of the matrices in ``values``.
        """
        return None

    @abstractmethod
    def scales(self, peaks: torch.Tensor, tensor_scale: torch.Tensor | None) -> torch.Tensor:
        """The stored scales of blocks, from the largest magnitude of each (float32)."""

    @abstractmethod
    def encode(self, ratios: torch.Tensor) -> torch.Tensor:
        """The stored elements, from values divided by their factors: rows and columns, float32."""

    @staticmethod
    @abstractmethod
    def factors(scales: torch.Tensor, tensor_scale: torch.Tensor | None) -> torch.Tensor:
        """The factors for the elements of each block, float32."""

    @staticmethod
    @abstractmethod
    def decode(elements: torch.Tensor) -> torch.Tensor:
        """The numbers that elements represent: float32, new memory, `packed` times as many columns."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """The elements and scales that a publisher makes of one tensor.

    Attributes:
        quantization: The format.
        item: Its description in manifests, with the names of the scales.
        elements: The elements of this process; the global shape is that of the stored tensor.
        scales: The scales of this process' blocks.
        tensor_scale: The scale of the whole matrix, or of each matrix of a stack; None if the format has none.
    """

    quantization: Quantization
    item: BlockScaled
    elements: LocalTensor
    scales: LocalTensor
    tensor_scale: LocalTensor | None

    def fill(self, name: str, values: torch.Tensor, now: Quantization) -> None:
        """Quantize the values as they are now; ``now`` equals `quantization`, with the peaks of this put."""
        whole = None
        if self.tensor_scale is not None:
            matrices = None
            if values.ndim > 2:
                matrices = torch.zeros(len(values), dtype=torch.long, device=values.device)
                for piece in self.tensor_scale.pieces:
                    (start,), (at,), (count,) = piece.box.offsets, piece.local, piece.box.shape
                    matrices[at : at + count] = torch.arange(start, start + count, device=values.device)
            whole = now.tensor_scale(name, values, matrices)
            if whole is not None:
                self.tensor_scale.tensor.copy_(whole)
        quantize(now, values, self.elements.tensor, self.scales.tensor, whole)

    def stored(self, name: str) -> dict[str, LocalTensor]:
        """The tensors that are put in place of the tensor of this name."""
        found = {name: self.elements, self.item.scales: self.scales}
        if self.tensor_scale is not None:
            found[self.item.tensor_scale] = self.tensor_scale
        return found


def room_for(
    quantization: Quantization,
    name: str,
    local: LocalTensor,
    room: Callable[[Ints, torch.dtype], torch.Tensor],
    key: str,
) -> Quantized:
    """Buffers for a process' quantized part of a matrix, or of a stack of matrices.

    ``room`` creates a tensor of a shape and dtype on the device of the matrix.

    Raises:
        BlockAlignmentError: A block is only partly in this process: its scale would depend on elements of others.
        LayoutMismatchError: The rows do not consist of whole stored elements.
    """
    block, packed = quantization.block_in(len(local.global_shape)), quantization.packed
    if local.global_shape[-1] % packed:
        raise LayoutMismatchError(
            key,
            f"{quantization.format} stores {packed} values in a byte, and rows have {local.global_shape[-1]} of them: "
            "leave this tensor out, by select=",
        )
    _check_whole_blocks(quantization, block, name, local, key)
    cell = (1,) * (len(block) - 1) + (packed,)
    whole = _matrix_scales(local, room) if quantization.tensor_suffix else None
    item = BlockScaled(
        quantization.format,
        block,
        packed,
        f"{name}{quantization.scale_suffix}",
        f"{name}{quantization.tensor_suffix}" if quantization.tensor_suffix else "",
    )
    return Quantized(
        quantization,
        item,
        _coarser(local, cell, room(up(tuple(local.tensor.shape), cell), quantization.dtype)),
        _coarser(local, block, room(up(tuple(local.tensor.shape), block), quantization.scale_dtype)),
        whole,
    )


def _matrix_scales(local: LocalTensor, room: Callable[[Ints, torch.dtype], torch.Tensor]) -> LocalTensor:
    """A buffer for the scale of a matrix, or for one scale of each matrix of a stack, distributed like the matrices."""
    stack = len(local.global_shape) - 2  # dims that count matrices: one, or none
    layout = None
    if local.layout is not None:
        placements = tuple(
            each if not isinstance(each, Replicate) and each.dim < stack else Replicate()
            for each in local.layout.placements
        )
        layout = Layout(local.global_shape[:stack], local.layout.mesh_shape, placements)
    pieces = dict.fromkeys(
        Piece(Box(piece.box.offsets[:stack], piece.box.shape[:stack]), piece.local[:stack]) for piece in local.pieces
    )
    tensor = room(tuple(local.tensor.shape[:stack]), torch.float32)
    return LocalTensor(tensor, local.global_shape[:stack], tuple(pieces), layout, local.coordinate)


def _check_whole_blocks(quantization: Quantization, block: Ints, name: str, local: LocalTensor, key: str) -> None:
    """Raise BlockAlignmentError if a scale would depend on elements of other processes."""
    cut = False
    for piece in local.pieces:
        box = piece.box
        for start, size, step, whole in zip(box.offsets, box.shape, block, local.global_shape, strict=True):
            cut |= bool(start % step or ((start + size) % step and start + size != whole))
        if cut:
            raise BlockAlignmentError(
                key,
                block,
                box.offsets,
                box.shape,
                "take blocks that divide the shards, or leave this tensor out, by select=",
            )
    if quantization.knows_peak(name):
        return
    for piece in local.pieces:
        if piece.box.shape[-2:] != local.global_shape[-2:]:
            raise BlockAlignmentError(
                key,
                local.global_shape,
                piece.box.offsets,
                piece.box.shape,
                "give peaks=peaks_of(state_dict), or leave this tensor out, by select=",
            )


def _coarser(local: LocalTensor, cell: Ints, room: torch.Tensor) -> LocalTensor:
    """A tensor with one element for each cell of another tensor, distributed in the same way."""
    pieces = tuple(
        Piece(Box(down(piece.box.offsets, cell), up(piece.box.shape, cell)), down(piece.local, cell))
        for piece in local.pieces
    )
    return LocalTensor(room, up(local.global_shape, cell), pieces, local.layout, local.coordinate)


def quantize(
    quantization: Quantization,
    values: torch.Tensor,
    elements: torch.Tensor,
    scales: torch.Tensor,
    tensor_scale: torch.Tensor | None = None,
) -> None:
    """Quantize a matrix whose first element begins a block, or each matrix of a stack.

    Args:
        quantization: The format.
        values: The values, of any floating-point dtype and strides.
        elements: Is filled; has the matrix' shape, divided by `Quantization.packed` along the last dim.
        scales: Is filled; one scale for each block.
        tensor_scale: The scale of the whole matrix, if the format has one; for a stack, one for each matrix.
    """
    if values.ndim > 2:
        for number, matrix in enumerate(values):
            whole = None if tensor_scale is None else tensor_scale[number]
            quantize(quantization, matrix, elements[number], scales[number], whole)
        return
    for rows, line in _strips(values.shape, quantization.block, _STRIP):
        blocks, shape = _in_blocks(values[rows].float(), quantization.block)
        # Rows first: reducing whole rows runs at the speed of memory.
        peaks = blocks.abs().amax(1).amax(-1)
        stored = quantization.scales(peaks, tensor_scale)
        as_bytes(scales)[line] = as_bytes(stored)
        ratios = blocks / quantization.factors(stored, tensor_scale)[:, None, :, None]
        encoded = quantization.encode(ratios.flatten(2).flatten(0, 1)[: shape[0], : shape[1]])
        as_bytes(elements)[rows] = as_bytes(encoded)


def dequantize(
    quantization: type[Quantization],
    block: Ints,
    elements: torch.Tensor,
    scales: torch.Tensor,
    tensor_scale: torch.Tensor | None,
    start: Ints,
    out: torch.Tensor,
) -> None:
    """Dequantize a matrix, or a stack of them, that begins ``start`` values inside its first block.

    Args:
        quantization: The format.
        block: The rows and columns that share a scale, in one matrix of a stack.
        elements: The elements with the requested values; the first and the last of a row may contain others, too.
        scales: The scales of all blocks that are touched.
        tensor_scale: The scale of the whole matrix, if the format has one; for a stack, one for each matrix.
        start: The position in the first block, in values, along each dim.
        out: Is filled; any floating-point dtype and strides.
    """
    if out.ndim > 2:
        for number, matrix in enumerate(out):
            whole = None if tensor_scale is None else tensor_scale[number]
            dequantize(quantization, block[1:], elements[number], scales[number], whole, start[1:], matrix)
        return
    skipped = start[1] % quantization.packed
    for rows, line in _strips(out.shape, block, _STRIP, start[0]):
        strip = quantization.decode(elements[rows])[:, skipped : skipped + out.shape[1]]
        factors = quantization.factors(scales[line], tensor_scale)
        first = (start[0] if rows.start == 0 else 0, start[1])
        if any(first):
            spread = factors.repeat_interleave(block[0], 0)[first[0] :][: strip.shape[0]]
            out[rows] = strip.mul_(spread.repeat_interleave(block[1], 1)[:, first[1] :][:, : strip.shape[1]])
        else:
            blocks, shape = _in_blocks(strip, block)
            out[rows] = (blocks * factors[:, None, :, None]).flatten(2).flatten(0, 1)[: shape[0], : shape[1]]


def _strips(shape: Ints, block: Ints, limit: int, start: int = 0) -> Iterator[tuple[slice, slice]]:
    """Groups of rows that are whole rows of blocks, in bounded numbers, with the rows of their scales."""
    height, width = shape
    step = block[0] * max(limit // max(block[0] * width, 1), 1)
    for begin in range(0, start + height, step):
        stop = min(begin + step, start + height)
        if stop > max(begin, start):
            yield slice(max(begin - start, 0), stop - start), slice(begin // block[0], -(-stop // block[0]))


def _in_blocks(matrix: torch.Tensor, block: Ints) -> tuple[torch.Tensor, tuple[int, int]]:
    """A matrix, padded with zeros to whole blocks, as (block row, row, block column, column); and its own shape."""
    rows, columns = matrix.shape
    if rows % block[0] or columns % block[1]:
        matrix = torch.nn.functional.pad(matrix, (0, -columns % block[1], 0, -rows % block[0]))
    blocks = matrix.reshape(matrix.shape[0] // block[0], block[0], matrix.shape[1] // block[1], block[1])
    return blocks, (rows, columns)


def down(numbers: Ints, block: Ints) -> Ints:
    """The cells of a grid that contain elements."""
    return tuple(number // step for number, step in zip(numbers, block, strict=True))


def up(numbers: Ints, block: Ints) -> Ints:
    """The number of cells of a grid that cover this many elements."""
    return tuple(-(-number // step) for number, step in zip(numbers, block, strict=True))
