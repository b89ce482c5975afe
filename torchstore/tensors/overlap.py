"""Detects destinations that share memory, with themselves or with one another.

If two entries were read into one byte, the last one would win. Only tied entries may share memory: they are one tensor
on both sides, so both write the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from skipper.torchstore.algebra.layout import Ints
from skipper.torchstore.errors import DestinationOverlapError

_MOST_ELEMENTS = 1 << 22  # of a tensor whose strides interleave: up to this many offsets are listed and compared
_MOST_WORK = 1 << 20  # steps of numpy's search; strides that come from slicing need a handful


@dataclass(frozen=True, slots=True)
class _Region:
    """The memory of a tensor: device, address, sizes and strides in elements, bytes of an element."""

    device: str
    address: int
    shape: Ints
    strides: Ints
    itemsize: int

    @property
    def end(self) -> int:
        """The address after the last byte."""
        return self.address + (_reach(self.shape, self.strides) + 1) * self.itemsize

    @property
    def __array_interface__(self) -> dict[str, object]:
        """A numpy array at these addresses. Its elements are never read, so the memory may be on any device."""
        return {
            "version": 3,
            "data": (self.address, True),
            "shape": self.shape,
            "strides": tuple(stride * self.itemsize for stride in self.strides),
            "typestr": f"|V{self.itemsize}",
        }


def check_distinct(key: str, entries: Sequence[tuple[str, torch.Tensor]], source: Callable[[int], Hashable]) -> None:
    """Refuse destinations that share memory, unless they are the same memory and are read from the same source.

    Costs a few microseconds for each entry; views that interleave (columns of one matrix) are compared exactly.

    ``source`` returns the source of the entry with an index. It is called only for entries that share memory.

    Raises:
        DestinationOverlapError: Two entries share memory; the message names them.
    """
    first: dict[_Region, int] = {}
    for index, (name, tensor) in enumerate(entries):
        if not tensor.numel():
            continue
        earlier = first.setdefault(_region(tensor), index)
        if earlier != index and source(earlier) != source(index):
            raise DestinationOverlapError(key, entries[earlier][0], name)
    active: list[_Region] = []
    for region in sorted(first, key=lambda region: (region.device, region.address)):
        active = [other for other in active if other.device == region.device and other.end > region.address]
        for other in active:
            if _share(other, region):
                raise DestinationOverlapError(key, *(entries[first[each]][0] for each in (other, region)))
        active.append(region)


def _region(tensor: torch.Tensor) -> _Region:
    device, address = str(tensor.device), tensor.data_ptr()
    if tensor.is_contiguous():  # the same bytes in any shape
        return _Region(device, address, (tensor.nbytes,), (1,), 1)
    return _Region(device, address, tuple(tensor.shape), tensor.stride(), tensor.element_size())


def overlaps_itself(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether several elements of a tensor with these strides are at one address, as after ``expand``."""
    if 0 in shape:
        return False
    dims = sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1)
    reach = 0
    for stride, size in dims:
        if stride <= reach or not stride:  # within the span of the smaller dims: perhaps between their elements
            return _collide(dims)
        reach += stride * (size - 1)
    return False


def _collide(dims: Sequence[tuple[int, int]]) -> bool:
    """Whether two index tuples have the same offset; too many to list count as a collision."""
    if dims[0][0] == 0 or math.prod(size for _, size in dims) > _MOST_ELEMENTS:
        return True
    offsets = np.zeros(1, np.int64)
    for stride, size in dims:
        offsets = np.add.outer(offsets, np.arange(size, dtype=np.int64) * stride).ravel()
    return len(np.unique(offsets)) < len(offsets)


def _share(left: _Region, right: _Region) -> bool:
    """Whether two regions have a byte in common; a search that takes too long counts as yes."""
    return np.may_share_memory(np.asarray(left), np.asarray(right), max_work=_MOST_WORK)  # type: ignore[arg-type]


def _reach(shape: Ints, strides: Ints) -> int:
    """The offset of the last element from the first."""
    return sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
