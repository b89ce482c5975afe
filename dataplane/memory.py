"""What a caller may hand over as memory, and every check of it that needs no transfer.

A `Region` is a contiguous range, a `StridedRegion` an N-dimensional view; both hold whatever keeps the memory where it
is. Nothing else in the package looks at user data.
"""

import enum
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from skipper.dataplane._copy import BufferView

if TYPE_CHECKING:
    from collections.abc import Callable

LONGEST_S: Final = 1e9
"""Thirty years: a longer timeout is taken for this one, since the system cannot wait for longer."""


class MemoryKind(enum.IntEnum):
    """Where memory lies. The numbers are part of the handle format."""

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
        anchor: Weakly referenceable; lives exactly as long as the allocation. None where nothing does.
    """

    address: int
    nbytes: int
    anchor: object


def contiguous(data: Any, role: str) -> Region:
    """Describe contiguous memory.

    Args:
        data: A torch tensor, a numpy array, or anything with the buffer protocol.
        role: What it is to the caller, for messages.

    Raises:
        TypeError: It is none of these, or a tensor without plain memory (sparse, meta, DTensor, ...).
        ValueError: It has no bytes, or is not contiguous.
    """
    if _is_tensor(data):
        region: Region = _tensors("contiguous")(data, role)
    else:
        view = _view(data, role)
        if not view.contiguous:
            raise ValueError(f"{role} must be contiguous; shape {view.shape} has strides {view.strides} bytes")
        region = Region(view.address, view.nbytes, view.readonly, HOST, 0, view)
    if region.nbytes == 0:
        raise ValueError(f"{role} has no bytes")
    return region


def strided(data: Any, role: str) -> StridedRegion:
    """Describe memory of any strides.

    Args:
        data: As for `contiguous`.
        role: What it is to the caller, for messages.

    Raises:
        TypeError: As for `contiguous`.
        ValueError: It has no bytes.
    """
    if _is_tensor(data):
        region: StridedRegion = _tensors("strided")(data, role)
    else:
        view = _view(data, role)
        region = StridedRegion(
            view.address, view.nbytes, view.readonly, HOST, 0, view, view.itemsize, view.shape, view.strides
        )
    if region.nbytes == 0:
        raise ValueError(f"{role} has no bytes")
    return region


def storage_of(data: Any, region: Region) -> Storage:
    """The allocation that `data`, described by `region`, is part of."""
    if _is_tensor(data):
        storage: Storage = _tensors("storage_of")(data)
        return storage
    if not isinstance(data, np.ndarray):
        return Storage(region.address, region.nbytes, None)
    root = data
    while isinstance(root.base, np.ndarray):
        root = root.base
    view = BufferView(root)
    if not view.contiguous or not (
        view.address <= region.address and region.address + region.nbytes <= view.address + view.nbytes
    ):
        return Storage(region.address, region.nbytes, data)
    # An array over somebody else's memory may die before that memory does: then the registration goes early, and
    # the next one is made anew.
    return Storage(view.address, view.nbytes, root)


def require_writable(region: Region, role: str) -> None:
    """Raise ValueError when the memory may not be written."""
    if region.readonly:
        raise ValueError(f"{role} is read-only memory")


def require_range(offset: Any, nbytes: Any, total: int) -> None:
    """Check that [offset, offset + nbytes) is a non-empty part of `total` bytes.

    Raises:
        TypeError: One is no integer.
        ValueError: It is empty or sticks out.
    """
    for name, value in (("offset", offset), ("nbytes", nbytes)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise TypeError(f"{name} must be an integer number of bytes, not {type(value).__name__}")
    if offset < 0 or nbytes <= 0 or offset + nbytes > total:
        raise ValueError(f"bytes [{offset}, {offset + nbytes}) are not a non-empty range within {total} bytes")


def require_timeout(timeout: Any) -> float:
    """The timeout in seconds as a float, at most `LONGEST_S`.

    Raises:
        TypeError: It is no number.
        ValueError: It is not positive.
    """
    if type(timeout) is float and 0 < timeout < LONGEST_S:
        return timeout
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout must be a number of seconds, not {type(timeout).__name__}")
    if not timeout > 0:
        raise ValueError(f"timeout must be positive, not {timeout}")
    return float(min(timeout, LONGEST_S))


def _is_tensor(data: Any) -> bool:
    # A tensor cannot exist before somebody has imported torch, so a numpy user never pays for the import.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(data, getattr(torch, "Tensor", ()))


def _tensors(name: str) -> "Callable[..., Any]":
    from skipper.dataplane import tensors  # it imports torch, which only a caller with a tensor has

    function: Callable[..., Any] = getattr(tensors, name)
    return function


def _view(data: Any, role: str) -> BufferView:
    try:
        return BufferView(data)
    except (TypeError, BufferError, ValueError):
        raise TypeError(
            f"{role} must be a torch tensor, a numpy array or another object with the buffer protocol, "
            f"not {type(data).__name__}"
        ) from None
