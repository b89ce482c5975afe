"""What a reader asks for, and how a single stored value becomes that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from skipper.torchstore.algebra.manifest import TensorItem
from skipper.torchstore.algebra.slices import TensorSlice
from skipper.torchstore.errors import DTypeMismatchError, KindMismatchError, LayoutMismatchError
from skipper.torchstore.protocol.messages import Selector
from skipper.torchstore.tensors.local_tensors import LocalTensor, check_destination, describe, describe_slice
from skipper.torchstore.tensors.naming import NameMap
from skipper.torchstore.tensors.values import as_bytes, load, new_tensor, open_inline, part_of
from skipper.torchstore.tensors.written import writing_mode, written


@dataclass(frozen=True, slots=True)
class ValueRequest:
    """What is wanted of one key: all of it or a part, and the tensor to put it into."""

    into: torch.Tensor | None = None
    part: TensorSlice | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDictRequest:
    """What is wanted of a state dict; see `torchstore.get_state_dict`.

    Attributes:
        into: Its tensors are to be filled; None: all of them are to be new.
        strict: Whether names must be the same on both sides.
        names: Says what is stored under other names; None: nothing is.
        delta: Whether the tensors still hold what the last such read has put there.
        serve: Whether they are offered to other readers afterwards.
    """

    key: str
    selector: Selector
    into: Mapping[Any, Any] | None = None
    strict: bool = True
    names: NameMap | None = None
    delta: bool = False
    serve: bool = False


def as_object(key: str, request: ValueRequest, value: Any) -> Any:
    """A stored object, which can only be asked for whole.

    Raises:
        KindMismatchError: A tensor or a part was asked for.
    """
    if request.into is not None or request.part is not None:
        raise KindMismatchError(key, "an object is stored there, not a tensor: ask without tensor and slice")
    return value


def target_of(key: str, request: ValueRequest, item: TensorItem) -> tuple[LocalTensor, torch.Tensor]:
    """Where a stored tensor goes, and what the caller gets back."""
    if request.part is not None:
        into = request.into
        if into is None:
            into = new_tensor(request.part.local_shape, item.dtype)
        return describe_slice(into, request.part, key=key), into
    if request.into is not None:
        return describe(request.into, key=key), request.into
    created = new_tensor(item.global_shape, item.dtype)
    return describe(created, key=key), created


def inline_value(key: str, request: ValueRequest, packed: bytes) -> Any:
    """What is wanted of a value that came in a message.

    Raises:
        MismatchError: It is something else.
    """
    inline = open_inline(packed)
    if not inline.dtype:
        return as_object(key, request, load(inline.data))
    into = request.into
    if into is not None and request.part is None and inline.fill(into):
        return into
    return _cut(key, request, inline.tensor())


def _cut(key: str, request: ValueRequest, tensor: torch.Tensor) -> torch.Tensor:
    """The part of a small tensor that is asked for, copied to where it is wanted."""
    if request.into is None:
        return tensor if request.part is None else part_of(tensor, request.part, key=key).clone()
    if request.part is not None:
        target = describe_slice(request.into, request.part, key=key)
    else:
        target = describe(request.into, key=key)
    check_destination(target.tensor, key)
    if target.tensor.dtype != tensor.dtype:
        raise DTypeMismatchError(key, f"stored as {tensor.dtype}, asked for as {target.tensor.dtype}")
    if target.global_shape != tuple(tensor.shape):
        raise LayoutMismatchError(key, f"stored with shape {tuple(tensor.shape)}, asked for with {target.global_shape}")
    with written([request.into]), writing_mode(target.tensor):
        for piece in target.pieces:
            here = _region(piece.local, piece.box.shape)
            as_bytes(target.tensor)[here].copy_(as_bytes(tensor)[_region(piece.box.offsets, piece.box.shape)])
    return request.into


def _region(offsets: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(offsets, shape, strict=True))
