"""What it takes to send a matrix as small elements and a scale for each block of them.

A `Quantization` is one format. It says how values become elements and scales, and how these become values again. All
else is the same for every format and is done here: the walk over the blocks, and the room that a publisher needs.
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
    """One format; an instance is what a publisher gives as ``transfer_dtype``.

    The first three methods make elements and scales, the last two undo them and need nothing of the publisher's
    choices: a reader calls them on the class that `format` names.

    Attributes:
        format: Its name in manifests.
        packed: Values in one stored element, along the last dim.
        scale_suffix: The scales of "w" are stored as "w" with this behind it.
        tensor_suffix: The same for the one scale of the whole tensor; "" where the format has none.
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
        """Of what is stored as the elements."""

    @property
    @abstractmethod
    def scale_dtype(self) -> torch.dtype:
        """Of what is stored as the scales."""

    @property
    @abstractmethod
    def select(self) -> Callable[[str], bool] | None:
        """Says by name which matrices are quantized; None: all."""

    @property
    def experts(self) -> Callable[[str], bool] | None:
        """Says by name which tensors of three dims are stacks of matrices, and quantized; None: none."""
        return None

    def takes(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether a tensor of this name is quantized."""
        if not tensor.is_floating_point() or tensor.element_size() == 1:
            return False
        if tensor.ndim == 3:
            return self.experts is not None and self.experts(name)
        return tensor.ndim == 2 and (self.select is None or self.select(name))

    def block_in(self, dims: int) -> Ints:
        """What shares a scale in a tensor of that many dims: of a stack, elements of one matrix."""
        return (1,) * (dims - 2) + self.block

    def knows_peak(self, name: str) -> bool:
        """Whether the scale of a whole matrix can be told by a process that holds only a part of it."""
        return not self.tensor_suffix

    def tensor_scale(
        self, name: str, values: torch.Tensor, matrices: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """The scale of a whole matrix, float32 without dims; None where the format has none.

        Of a stack, one for each matrix; ``matrices`` are the numbers of those that ``values`` has.
        """
        return None

    @abstractmethod
    def scales(self, peaks: torch.Tensor, tensor_scale: torch.Tensor | None) -> torch.Tensor:
        """The scales of blocks as they are stored, from the largest magnitude of each (float32)."""

    @abstractmethod
    def encode(self, ratios: torch.Tensor) -> torch.Tensor:
        """Elements as they are stored, from values divided by their factors: rows and columns, float32."""

    @staticmethod
    @abstractmethod
    def factors(scales: torch.Tensor, tensor_scale: torch.Tensor | None) -> torch.Tensor:
        """What the elements of each block are multiplied by, float32."""

    @staticmethod
    @abstractmethod
    def decode(elements: torch.Tensor) -> torch.Tensor:
        """The numbers that elements stand for: float32, new memory, `packed` times as many columns."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """The elements and scales that a publisher makes of one tensor.

    Attributes:
        quantization: The format.
        item: What manifests say of it, with the names of the scales.
        elements: Of this process; its global shape is that of what is stored.
        scales: Of the blocks of this process.
        tensor_scale: Of the whole matrix, or of each matrix of a stack; None where the format has none.
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
        """What is put in place of the tensor of this name."""
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
    """Room for what a process makes of its part of a matrix, or of a stack of them.

    ``room`` makes a tensor of a shape and dtype on the device of the matrix.

    Raises:
        BlockAlignmentError: A block lies partly in this process: its scale would depend on another one's elements.
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
    """Room for the scale of a matrix, or for one of each matrix of a stack, spread as the matrices are."""
    stack = len(local.global_shape) - 2  # dims that number matrices: one, or none
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
    """Raise BlockAlignmentError where a scale would depend on elements of other processes."""
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
    """A tensor with one element for each cell of another one, spread as that one is."""
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
        values: Of any floating-point dtype and strides.
        elements: Is filled; of the matrix' shape, divided by `Quantization.packed` along the last dim.
        scales: Is filled; one for each block.
        tensor_scale: Of the whole matrix, where the format has one; of a stack, one for each.
    """
    if values.ndim > 2:
        for number, matrix in enumerate(values):
            whole = None if tensor_scale is None else tensor_scale[number]
            quantize(quantization, matrix, elements[number], scales[number], whole)
        return
    for rows, line in _strips(values.shape, quantization.block, _STRIP):
        blocks, shape = _in_blocks(values[rows].float(), quantization.block)
        # Rows first: to reduce whole rows runs at the speed of memory.
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
    """The values of a matrix, or of a stack of them, that begins ``start`` values within the first of its blocks.

    Args:
        quantization: The format.
        block: What shares a scale: rows and columns, in one matrix of a stack.
        elements: Those that hold the wanted values; the first and the last of a row may hold others, too.
        scales: Of all blocks that are touched.
        tensor_scale: Of the whole matrix, where the format has one; of a stack, one for each.
        start: In values, along each dim.
        out: Is filled; of any floating-point dtype and strides.
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


def down(numbers: Ints, block: Ints) -> Ints:
    """The cells of a grid in which elements lie."""
    return tuple(number // step for number, step in zip(numbers, block, strict=True))


def up(numbers: Ints, block: Ints) -> Ints:
    """How many cells of a grid it takes to cover as many elements."""
    return tuple(-(-number // step) for number, step in zip(numbers, block, strict=True))
