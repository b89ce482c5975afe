"""`TensorMetadata`: what the script knows of a tensor on the workers; equal metadata is one object."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

_known: weakref.WeakValueDictionary[tuple[object, ...], TensorMetadata] = weakref.WeakValueDictionary()


@dataclass(eq=False, slots=True, weakref_slot=True)
class TensorMetadata:
    """Shape, strides, storage offset, dtype and device of a tensor, and whether it is a view through `conj` or `-`.

    Make them only by `metadata`: then equal ones are the same object, so that they are compared, and hashed, by
    identity.

    Attributes:
        numel: the number of elements.
        nbytes: size of the elements in bytes; memory that views share counts for each view.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    is_conj: bool = False
    is_neg: bool = False
    numel: int = field(init=False)
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.numel = math.prod(self.shape)
        self.nbytes = self.numel * self.dtype.itemsize

    @property
    def extent(self) -> int:
        """Elements of the storage from its beginning to the end of the last element of the tensor."""
        if self.numel == 0:
            return self.offset
        return self.offset + 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))

    def contiguous(self) -> TensorMetadata:
        """The metadata of a new contiguous tensor of the same shape."""
        return metadata(self.shape, self.dtype, self.device)

    def __reduce__(self) -> tuple[object, ...]:
        return (metadata, (self.shape, self.dtype, self.device, self.stride, self.offset, self.is_conj, self.is_neg))

    def __repr__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)} on {self.device}"


def metadata(
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    stride: Sequence[int] | None = None,
    offset: int = 0,
    is_conj: bool = False,
    is_neg: bool = False,
) -> TensorMetadata:
    """The one `TensorMetadata` object of these values; without strides, that of a contiguous tensor."""
    sizes = tuple(shape)
    steps = _contiguous_strides(sizes) if stride is None else tuple(stride)
    place = torch.device(device)
    key = (sizes, steps, offset, dtype, place, is_conj, is_neg)
    known = _known.get(key)
    if known is None:
        known = _known.setdefault(key, TensorMetadata(*key))
    return known


def metadata_of(tensor: torch.Tensor) -> TensorMetadata:
    """The metadata of any strided tensor, a fake one included."""
    return metadata(
        tensor.shape,
        tensor.dtype,
        tensor.device,
        tensor.stride(),
        int(tensor.storage_offset()),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
