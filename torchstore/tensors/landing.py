"""Buffers where quantized tensors arrive before they become the values of a reader's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from skipper.torchstore.algebra.layout import Box, Ints, Piece
from skipper.torchstore.algebra.manifest import BlockScaled, TensorItem
from skipper.torchstore.errors import LayoutMismatchError
from skipper.torchstore.tensors.block_fp8 import BlockFP8
from skipper.torchstore.tensors.cells import region
from skipper.torchstore.tensors.local_tensors import LocalTensor, check_destination
from skipper.torchstore.tensors.microscaling import MXFP8, NVFP4
from skipper.torchstore.tensors.quantization import Quantization, dequantize, down, up
from skipper.torchstore.tensors.values import dtype_named
from skipper.torchstore.tensors.written import writing_mode

_FORMATS: Mapping[str, type[Quantization]] = {kind.format: kind for kind in (BlockFP8, MXFP8, NVFP4)}


@dataclass(frozen=True, slots=True)
class Landing:
    """Buffers where quantized bytes arrive before they become values of a reader's tensor.

    Its boundaries may cut blocks, and bytes with several values: everything that it touches is read.

    Attributes:
        into: The reader's own tensor.
        scaled: How its values are stored.
        elements: The buffer for the elements, in place of the reader's tensor; one piece for each of its pieces.
        scales: The buffer for the scales, with the same pieces.
        tensor_scale: The scale of the whole matrix, or of each matrix of a stack; None if the format has none.
    """

    into: LocalTensor
    scaled: BlockScaled
    elements: LocalTensor
    scales: LocalTensor
    tensor_scale: LocalTensor | None

    @staticmethod
    def of(into: LocalTensor, scaled: BlockScaled, items: Mapping[str, TensorItem], dtype: str) -> Landing:
        """Buffers for a tensor's part of a quantized item whose elements have this dtype."""
        whole = _matrix_scales(into) if scaled.tensor_scale else None
        cell = (1,) * (len(scaled.block) - 1) + (scaled.packed,)
        return Landing(
            into,
            scaled,
            _room(into, cell, dtype_named(dtype)),
            _room(into, scaled.block, dtype_named(items[scaled.scales].dtype)),
            whole,
        )

    def fits(self, into: LocalTensor, item: TensorItem) -> bool:
        """Whether it is the landing of this same tensor for a quantized item."""
        boxes = (self.into.global_shape, self.into.pieces) == (into.global_shape, into.pieces)
        return boxes and self.scaled == item.scaled and str(self.elements.tensor.dtype) == item.dtype

    def beside(self) -> dict[str, LocalTensor]:
        """What must be read in addition to the elements, by stored name."""
        found = {self.scaled.scales: self.scales}
        if self.tensor_scale is not None:
            found[self.scaled.tensor_scale] = self.tensor_scale
        return found

    def memory(self) -> frozenset[int]:
        """The ids of the tensors in which bytes arrive."""
        return frozenset(id(part.tensor) for part in (self.elements, *self.beside().values()))

    def finish(self) -> None:
        """Write the values, after everything has arrived."""
        with writing_mode(self.into.tensor):
            for number, piece in enumerate(self.into.pieces):
                start = tuple(at % step for at, step in zip(piece.box.offsets, self.scaled.block, strict=True))
                out = region(self.into.tensor, piece.local, piece.box.shape)
                write_values(self.scaled, (self.elements, self.scales, self.tensor_scale), number, start, out)


def write_values(
    scaled: BlockScaled,
    stored: tuple[LocalTensor, LocalTensor, LocalTensor | None],
    number: int,
    start: Ints,
    out: torch.Tensor,
) -> None:
    """Write the values of one piece of a quantized matrix, or of a stack of them.

    Args:
        scaled: How they are stored.
        stored: The elements, their scales, and the scales of whole matrices if the format has them.
        number: The number of the piece, equal for elements and scales.
        start: The position of the first value in the first block, along each dim.
        out: The tensor to fill, of any floating-point dtype and strides.
    """
    elements, scales, whole = stored
    piece, lines = elements.pieces[number], scales.pieces[number]
    dequantize(
        _FORMATS[scaled.format],
        scaled.block,
        region(elements.tensor, piece.local, piece.box.shape),
        region(scales.tensor, lines.local, lines.box.shape),
        None if whole is None else _scales_within(whole, lines.box),
        start,
        out,
    )


def _room(into: LocalTensor, cell: Ints, dtype: torch.dtype) -> LocalTensor:
    """A buffer for the cells of a grid that a tensor touches."""
    pieces: list[Piece] = []
    first_dim, others = 0, [0] * (len(cell) - 1)
    for piece in into.pieces:
        stop = tuple(start + size for start, size in zip(piece.box.offsets, piece.box.shape, strict=True))
        first = down(piece.box.offsets, cell)
        box = Box(first, tuple(b - a for a, b in zip(first, up(stop, cell), strict=True)))
        pieces.append(Piece(box, (first_dim, *(0 for _ in others))))  # stacked: they may need the same cell
        first_dim, others = first_dim + box.shape[0], list(map(max, others, box.shape[1:]))
    room = torch.empty((first_dim, *others), dtype=dtype, device=into.tensor.device)
    return LocalTensor(room, up(into.global_shape, cell), tuple(pieces))


def _matrix_scales(into: LocalTensor) -> LocalTensor:
    """A buffer for the scale of a matrix, or for those of the matrices of a stack that a tensor touches."""
    stack = len(into.global_shape) - 2
    if not stack:
        one = torch.empty((), dtype=torch.float32, device=into.tensor.device)
        return LocalTensor(one, (), (Piece(Box((), ()), ()),))
    boxes = dict.fromkeys(Box(piece.box.offsets[:1], piece.box.shape[:1]) for piece in into.pieces)
    pieces: list[Piece] = []
    for box in boxes:
        pieces.append(Piece(box, (sum(piece.box.shape[0] for piece in pieces),)))
    room = torch.empty(sum(box.shape[0] for box in boxes), dtype=torch.float32, device=into.tensor.device)
    return LocalTensor(room, into.global_shape[:1], tuple(pieces))


def _scales_within(whole: LocalTensor, box: Box) -> torch.Tensor:
    """The scales of the matrices that a box of a stack touches, or the scale of the only matrix."""
    if not whole.global_shape:
        return whole.tensor
    start, count = box.offsets[0], box.shape[0]
    for piece in whole.pieces:
        before = start - piece.box.offsets[0]
        if before >= 0 and before + count <= piece.box.shape[0]:
            return whole.tensor[piece.local[0] + before :][:count]
    raise AssertionError(f"there are no scales for the matrices from {start} on")


def land(
    key: str,
    targets: Mapping[str, LocalTensor],
    names: Mapping[str, str],
    items: Mapping[str, TensorItem],
    earlier: Mapping[str, Landing],
) -> tuple[dict[str, LocalTensor], dict[str, str], dict[str, Landing]]:
    """Replace targets for the values of quantized tensors by landings.

    ``names`` has the stored names of labels that differ from them, ``earlier`` the landings of the same targets from an
    earlier read, for reuse.

    Returns:
        The targets to read, the stored names of their labels, and the landings by label.

    Raises:
        LayoutMismatchError: A target cannot be written to, or is a part of a tensor of another shape.
    """
    into, stored, landings = dict(targets), dict(names), {}
    for label, target in targets.items():
        item = items.get(names.get(label, label))
        if item is None or item.scaled is None or not lands(item, target.tensor.dtype):
            continue
        check_destination(target.tensor, f"{key}/{label}")
        if target.global_shape != item.value_shape:
            raise LayoutMismatchError(
                f"{key}/{label}", f"stored with shape {item.value_shape}, requested with {target.global_shape}"
            )
        known = earlier.get(label)
        fits = known is not None and known.fits(target, item)
        landing = known if fits and known else Landing.of(target, item.scaled, items, item.dtype)
        landings[label], into[label] = landing, landing.elements
        for name, room in landing.beside().items():
            beside = f"{label} ({name})"
            into[beside], stored[beside] = room, name
    return into, stored, landings


def is_known_format(name: str) -> bool:
    """Whether values of this format can be read."""
    return name in _FORMATS


def lands(item: TensorItem, dtype: torch.dtype) -> bool:
    """Whether a tensor of this dtype takes the values of a quantized item instead of its bytes."""
    return item.scaled is not None and dtype.is_floating_point and dtype.itemsize > 1
