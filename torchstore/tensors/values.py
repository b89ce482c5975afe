"""Values as bytes: tensors small enough to travel in a message, and pickled objects."""

from __future__ import annotations

import ctypes
import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import torch

from skipper.torchstore.algebra.slices import TensorSlice
from skipper.torchstore.errors import DTypeMismatchError, KindMismatchError, LayoutMismatchError
from skipper.torchstore.tensors.cells import region
from skipper.torchstore.tensors.local_tensors import is_direct, is_dtensor, is_plain, resolved, why_not_dense
from skipper.torchstore.tensors.written import written

INLINE_BYTES = 8192
"""Up to this size, a value is sent in the control message: cheaper than an arena, a plan and a read."""


def dump(value: Any, *, key: str) -> bytes:
    """Pickle an object; classes and functions of the script itself are pickled by value.

    Raises:
        KindMismatchError: It cannot be pickled, or it contains a DTensor (a pickle would hold only one rank's shard).
    """
    file = io.BytesIO()
    try:
        _Pickler(file).dump(value)
    except KindMismatchError as error:
        raise KindMismatchError(key, str(error)) from None
    except Exception as error:  # an object that cannot be pickled may raise anything
        kind = type(value).__name__
        raise KindMismatchError(key, f"the {kind} cannot be pickled: {type(error).__name__}: {error}") from error
    return file.getvalue()


def dump_entries(key: str, entries: Mapping[str, Any]) -> bytes:
    """Pickle the entries of a state dict that are not tensors, as one object.

    Raises:
        KindMismatchError: As for `dump`; the message names the entry.
    """
    try:
        return dump(entries, key=key)
    except KindMismatchError:
        for name, value in entries.items():
            dump(value, key=f"{key}/{name}")
        raise


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        if is_dtensor(obj):
            raise KindMismatchError("", "an object that holds a DTensor cannot be stored: put_state_dict takes those")
        return super().reducer_override(obj)


def load(data: bytes) -> Any:
    """The inverse of `dump`. Only for bytes from this job's own processes, which control has authenticated."""
    return cloudpickle.loads(data)


@dataclass(frozen=True, slots=True)
class Inline:
    """A value that is sent in the message itself, without arena, plan or read.

    Attributes:
        data: The tensor's bytes in row-major order, or a pickle.
        dtype: The dtype as torch prints it; "" for an object.
        shape: The shape of the tensor.
    """

    data: bytes
    dtype: str
    shape: tuple[int, ...]

    def tensor(self) -> torch.Tensor:
        """A new tensor with this value."""
        if not self.data:
            return new_tensor(self.shape, self.dtype)
        flat = torch.frombuffer(bytearray(self.data), dtype=dtype_named(self.dtype))
        return flat if len(self.shape) == 1 else flat.reshape(self.shape)

    def fill(self, into: torch.Tensor) -> bool:
        """Copy its bytes into a tensor of the same dtype and shape.

        Returns:
            Whether that was done: not if the tensor does not match, is a shard, is on a device, or is not contiguous.
        """
        if _name_of(into.dtype) != self.dtype or tuple(into.shape) != self.shape:
            return False
        if not (is_plain(into) and into.is_cpu and into.is_contiguous() and into.nbytes == len(self.data)):
            return False
        with written([into]):
            ctypes.memmove(into.data_ptr(), self.data, len(self.data))
        return True


def inline_object(data: bytes) -> bytes:
    """A pickle as bytes for `open_inline`; empty if it is too large."""
    # Tuples of plain values: the C pickler handles them without a step in Python.
    return pickle.dumps((data, "", ()), protocol=5) if len(data) <= INLINE_BYTES else b""


def inline_tensor(tensor: torch.Tensor) -> bytes:
    """A tensor as bytes for `open_inline`; empty if it is too large, a shard, or without its own memory.

    The controller keeps and returns these bytes unchanged.
    """
    plain = type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter
    if not plain or ((reason := why_not_dense(tensor)) and is_direct(tensor)):
        return b""
    if tensor.nbytes > INLINE_BYTES:
        return b""
    if tensor.is_cpu and tensor.is_contiguous() and not reason:
        # Each torch operation releases the GIL, for which other threads wait.
        data = ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
    else:
        dense = as_bytes(resolved(tensor).detach()).contiguous()
        data = dense.reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
    return pickle.dumps((data, _name_of(tensor.dtype), tuple(tensor.shape)), protocol=5)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as uint8 if elements have one byte: torch cannot copy narrow integers (int4)."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


@cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype)


def open_inline(packed: bytes) -> Inline:
    """The inverse of `inline_tensor` and `inline_object`. Only for bytes from this job, authenticated by control."""
    return Inline(*pickle.loads(packed))


@cache
def dtype_named(name: str) -> torch.dtype:
    """The dtype that torch prints as ``name``.

    Raises:
        DTypeMismatchError: This version of torch does not have it.
    """
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise DTypeMismatchError("", f"this version of torch knows no dtype {name!r}")
    return dtype


def new_tensor(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """Memory for a stored tensor without a destination: on the host, for any default device of torch.

    Raises:
        DTypeMismatchError: This version of torch does not have the dtype.
    """
    return torch.empty(shape, dtype=dtype_named(dtype), device="cpu")


def part_of(tensor: torch.Tensor, part: TensorSlice, *, key: str) -> torch.Tensor:
    """The view of a whole tensor for a slice.

    Raises:
        LayoutMismatchError: The slice belongs to a tensor of another shape.
    """
    if tuple(tensor.shape) != part.global_shape:
        raise LayoutMismatchError(
            key, f"the slice is of a tensor of shape {part.global_shape}, stored is {tuple(tensor.shape)}"
        )
    return region(tensor, part.offsets, part.local_shape)
