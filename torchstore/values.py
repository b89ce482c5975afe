"""Values as bytes: tensors small enough to travel in a message, and pickled objects."""

from __future__ import annotations

import ctypes
import pickle
from dataclasses import dataclass
from functools import cache
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import torch

from torchstore.errors import DTypeMismatchError, LayoutMismatchError
from torchstore.slices import TensorSlice

INLINE_BYTES = 8192
"""Up to this size a value travels in the control message: cheaper than an arena, a plan and a read."""


def dump(value: Any) -> bytes:
    """Pickle an object; classes and functions of the script itself travel by value.

    Raises:
        TypeError: It cannot be pickled.
    """
    return bytes(cloudpickle.dumps(value))


def load(data: bytes) -> Any:
    """Undo `dump`. Only for bytes from this job's own processes, which control has authenticated."""
    return cloudpickle.loads(data)


@dataclass(frozen=True, slots=True)
class Inline:
    """A value that travels in the message itself: no arena, no plan, no read.

    Attributes:
        data: The tensor's bytes in row-major order, or a pickle.
        dtype: As torch prints it; "" for an object.
        shape: Of the tensor.
    """

    data: bytes
    dtype: str
    shape: tuple[int, ...]

    def tensor(self) -> torch.Tensor:
        """A new tensor of it."""
        dtype = dtype_named(self.dtype)
        if not self.data:
            return torch.empty(self.shape, dtype=dtype)
        flat = torch.frombuffer(bytearray(self.data), dtype=dtype)
        return flat if len(self.shape) == 1 else flat.reshape(self.shape)


def inline_object(data: bytes) -> bytes:
    """A pickle as bytes for `open_inline`; empty if it is too large."""
    # Tuples of plain values: the C pickler does them without a step in Python.
    return pickle.dumps((data, "", ()), protocol=5) if len(data) <= INLINE_BYTES else b""


def inline_tensor(tensor: torch.Tensor) -> bytes:
    """A tensor as bytes for `open_inline`; empty if it is too large, a shard, or not dense.

    The controller keeps and hands out these bytes as they are.
    """
    plain = type(tensor) is torch.Tensor or isinstance(tensor, torch.nn.Parameter)
    if not plain or tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        return b""
    if tensor.nbytes > INLINE_BYTES:
        return b""
    if tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        # Each operation of torch lets go of the interpreter lock, which other threads are waiting for.
        data = ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
    else:
        dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
        data = dense.reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
    return pickle.dumps((data, _name_of(tensor.dtype), tuple(tensor.shape)), protocol=5)


@cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype)


def open_inline(packed: bytes) -> Inline:
    """Undo `inline_tensor` and `inline_object`. Only for bytes from this job, which control has authenticated."""
    return Inline(*pickle.loads(packed))


@cache
def dtype_named(name: str) -> torch.dtype:
    """The dtype that torch prints as ``name``.

    Raises:
        DTypeMismatchError: This torch does not have it.
    """
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise DTypeMismatchError("", f"this version of torch knows no dtype {name!r}")
    return dtype


def part_of(tensor: torch.Tensor, part: TensorSlice, *, key: str) -> torch.Tensor:
    """The view of a whole tensor that a slice names.

    Raises:
        LayoutMismatchError: The slice is one of a tensor of another shape.
    """
    if tuple(tensor.shape) != part.global_shape:
        raise LayoutMismatchError(
            key, f"the slice is of a tensor of shape {part.global_shape}, stored is {tuple(tensor.shape)}"
        )
    return tensor[tuple(slice(start, start + size) for start, size in zip(part.offsets, part.local_shape, strict=True))]
