"""Regions of checkpoint tensors and of parameters, and the copies between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

import torch

from skipper.torchstore.algebra.layout import Ints, contiguous_strides
from skipper.torchstore.algebra.strided import Strided

MOST_BLOCKS = 4096
"""Of one region: more scattered regions are read whole, because each block costs about 10 us each time."""


@dataclass(frozen=True, slots=True)
class RecordedTensor:
    """The shape and dtype of a parameter or a checkpoint tensor when the plan was recorded.

    Attributes:
        shape: The shape of the whole tensor.
        dtype: The dtype as torch prints it: "torch.bfloat16".
        strides: The strides in memory, in elements; checkpoint tensors are row-major.
    """

    shape: Ints
    dtype: str
    strides: Ints

    @staticmethod
    def of(shape: Iterable[int], dtype: object, strides: Ints | None = None) -> RecordedTensor:
        """A tensor with these properties; contiguous if no strides are given."""
        sizes = tuple(shape)
        return RecordedTensor(sizes, str(dtype), contiguous_strides(sizes) if strides is None else strides)

    @property
    def nbytes(self) -> int:
        """The size of all its elements, in bytes."""
        return self.all.numel * dtype_of(self.dtype).itemsize

    @property
    def all(self) -> Strided:
        """The addresses of its elements in its own memory."""
        return Strided(0, self.shape, self.strides)

    def __str__(self) -> str:
        plain = self.strides == contiguous_strides(self.shape) or self.all.numel == 0
        return f"{self.dtype.removeprefix('torch.')}{list(self.shape)}{'' if plain else f' strides {self.strides}'}"


@dataclass(frozen=True, slots=True)
class RegionBlock:
    """A box of a checkpoint tensor, and the part of a parameter that it fills.

    Attributes:
        offsets: The offsets of the box in the checkpoint tensor.
        into: One address for each element of the box, in its shape, relative to the parameter's first element.
    """

    offsets: Ints
    into: Strided


@dataclass(frozen=True, slots=True)
class RegionCopy:
    """Elements of one checkpoint tensor that become elements of one parameter.

    Attributes:
        parameter: The name of the parameter in the model.
        into: Addresses relative to its first element, in elements, by its own strides.
        checkpoint: The name of the tensor in the checkpoint.
        source: The addresses there, row-major, in the same shape as ``into``.
        casts: The dtypes to which the values are cast one after the other, the parameter's last; none if both are
        equal.
    """

    parameter: str
    into: Strided
    checkpoint: str
    source: Strided
    casts: tuple[str, ...] = ()

    def blocks(self, shape: Ints) -> Iterator[RegionBlock]:
        """The same as boxes of the checkpoint tensor with this shape."""
        strides = contiguous_strides(shape)
        axis = {stride: dim for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)) if size > 1}
        sizes, steps = [1] * len(shape), [0] * len(shape)
        others: list[tuple[int, int, int]] = []
        for size, source, into in zip(self.source.shape, self.source.strides, self.into.strides, strict=True):
            if source in axis:
                sizes[axis[source]], steps[axis[source]] = size, into
            else:
                others.append((size, source, into))
        for index in product(*(range(size) for size, _, _ in others)):
            start = self.source.offset + sum(at * source for at, (_, source, _) in zip(index, others, strict=True))
            first = self.into.offset + sum(at * into for at, (_, _, into) in zip(index, others, strict=True))
            offsets = []
            for stride in strides:
                at, start = divmod(start, max(stride, 1))
                offsets.append(at)
            yield RegionBlock(tuple(offsets), Strided(first, tuple(sizes), tuple(steps)))


@dataclass(frozen=True, slots=True)
class RegionFill:
    """Elements of a parameter that have one value for any checkpoint: padding.

    Attributes:
        parameter: The name of the parameter in the model.
        into: Addresses relative to its first element, in elements.
        value: A number that the parameter's dtype can represent.
    """

    parameter: str
    into: Strided
    value: float


@dataclass(frozen=True, slots=True)
class WholeTensors:
    """Checkpoint tensors that are read whole and passed to the model's own `load_weights`, all in one call.

    Attributes:
        names: Their names.
        reason: The operation on them that a copy cannot express.
    """

    names: tuple[str, ...]
    reason: str


def is_scattered(copy: RegionCopy, shape: Ints) -> bool:
    """Whether a copy reads more than `MOST_BLOCKS` boxes of the checkpoint tensor, which has this shape."""
    strides = {stride for size, stride in zip(shape, contiguous_strides(shape), strict=True) if size > 1}
    axes = zip(copy.source.shape, copy.source.strides, strict=True)
    return prod(size for size, stride in axes if stride not in strides) > MOST_BLOCKS


def region_of(tensor: torch.Tensor, region: Strided) -> torch.Tensor:
    """The view of a parameter for a region, in the region's shape."""
    tensor = tensor.detach()
    return tensor.as_strided(region.shape, region.strides, int(tensor.storage_offset()) + region.offset)


def dtype_of(name: str) -> torch.dtype:
    """The dtype that torch prints like this.

    Raises:
        ValueError: There is none.
    """
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return found
