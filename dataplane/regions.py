"""Types for memory in the data plane: a kind, a range, a view of it, and the allocation around it."""

import enum
from dataclasses import dataclass
from typing import Final


class MemoryKind(enum.IntEnum):
    """Where memory is. The numbers are part of the handle format."""

    HOST = 0
    CUDA = 1


HOST: Final = MemoryKind.HOST


@dataclass(slots=True)
class Region:
    """A contiguous range of memory.

    Attributes:
        address: Virtual address of its first byte in this process.
        nbytes: Its length.
        readonly: Whether the owner of the memory forbids writing.
        kind: Host or device memory.
        device: Index of the device; 0 for host memory.
        keep: Keeps the memory valid and in place while referenced.
    """

    address: int
    nbytes: int
    readonly: bool
    kind: MemoryKind
    device: int
    keep: object


@dataclass(slots=True)
class StridedRegion(Region):
    """An N-dimensional view of memory; `address` is that of element (0, ..., 0), strides are in bytes."""

    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(slots=True)
class Storage:
    """The allocation that a region is part of: what a registration covers and how long it may last.

    Attributes:
        address: First byte.
        nbytes: Its length.
        anchor: Weakly referenceable; lives exactly as long as the allocation. None if there is no such object.
    """

    address: int
    nbytes: int
    anchor: object
