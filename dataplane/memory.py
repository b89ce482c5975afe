"""The objects that callers may pass as memory, and every check of them that needs no transfer.

A `Region` is a contiguous range, a `StridedRegion` an N-dimensional view; both hold the object that keeps the memory in
place. Only this file and `tensors`, for tensors, look at the caller's objects.
"""

import sys
from typing import Any

import numpy as np

from skipper.dataplane import tensors
from skipper.dataplane._copy import BufferView
from skipper.dataplane.regions import HOST, Region, Storage, StridedRegion


def contiguous(data: Any, role: str) -> Region:
    """Describe contiguous memory.

    Args:
        data: A torch tensor, a numpy array, or anything with the buffer protocol.
        role: What it is to the caller, for messages.

    Raises:
        TypeError: It is none of these, or a tensor without plain memory (sparse, meta, DTensor, ...).
        ValueError: It has no bytes, or is not contiguous.
    """
    if type(data) is not np.ndarray and _is_tensor(data):
        region = tensors.contiguous(data, role)
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
        region = tensors.strided(data, role)
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
        return tensors.storage_of(data)
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
    # An array over memory of another object may die before that memory does. Then the registration ends early, and the
    # next use makes another one.
    return Storage(view.address, view.nbytes, root)


def require_writable(region: Region, role: str) -> None:
    """Raise ValueError when the memory may not be written."""
    if region.readonly:
        raise ValueError(f"{role} is read-only memory")


def require_range(offset: Any, nbytes: Any, total: int) -> None:
    """Check that [offset, offset + nbytes) is a non-empty part of `total` bytes.

    Raises:
        TypeError: One is no integer.
        ValueError: It is empty or exceeds `total`.
    """
    for name, value in (("offset", offset), ("nbytes", nbytes)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise TypeError(f"{name} must be an integer number of bytes, not {type(value).__name__}")
    if offset < 0 or nbytes <= 0 or offset + nbytes > total:
        raise ValueError(f"bytes [{offset}, {offset + nbytes}) are not a non-empty range within {total} bytes")


def _is_tensor(data: Any) -> bool:
    # A tensor cannot exist before torch is imported: users of numpy never pay for the import.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(data, getattr(torch, "Tensor", ()))


def _view(data: Any, role: str) -> BufferView:
    try:
        return BufferView(data)
    except (TypeError, BufferError, ValueError):
        raise TypeError(
            f"{role} must be a torch tensor, a numpy array or another object with the buffer protocol, "
            f"not {type(data).__name__}"
        ) from None
