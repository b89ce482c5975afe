"""Which tensors have dense memory of their own, whose bytes can be stored and filled, and why the others have none."""

from __future__ import annotations

import torch
from torch.nn.parameter import is_lazy

from skipper.torchstore.errors import KindMismatchError

_NO_POINTER = (RuntimeError, NotImplementedError, ValueError)  # what torch raises where there is no address


def check_dense(tensor: torch.Tensor, key: str) -> None:
    """Refuse a tensor whose elements do not lie, as they are, in memory that is its own.

    Raises:
        KindMismatchError: It says which kind of tensor it is, and what to give instead.
    """
    reason = why_not_dense(tensor)
    if reason:
        raise KindMismatchError(key, reason)


def why_not_dense(tensor: torch.Tensor) -> str:
    """Why a tensor's bytes can be neither stored nor filled; empty if they can.

    A DTensor is asked about by its local tensor. Costs a microsecond or two, and reads no element.
    """
    if is_lazy(tensor):
        return "it is uninitialized (lazy) and has no shape yet: run a forward pass of its module first"
    if tensor.is_nested:
        return "nested tensors cannot be stored or filled: give the tensors that it consists of (unbind())"
    if tensor.layout != torch.strided:
        return f"only dense tensors can be stored or filled, not {tensor.layout}: use to_dense(), or give its parts"
    if tensor.is_quantized:
        return f"{tensor.dtype} comes with scales and zero points: give int_repr() and those, or use dequantize()"
    if tensor.is_meta:
        return "a tensor on the meta device has no memory"
    if tensor.is_conj() or tensor.is_neg():
        return "the tensor is a lazy conjugate or negation of other memory: use resolve_conj(), resolve_neg()"
    return _why_no_memory(tensor)


def is_direct(tensor: torch.Tensor) -> bool:
    """Whether the bytes at a strided tensor's address are its elements: it is no lazy conjugate or negation."""
    return not (tensor.is_conj() or tensor.is_neg())


def _why_no_memory(tensor: torch.Tensor) -> str:
    try:
        storage = tensor.untyped_storage()
        address, nbytes = storage.data_ptr(), storage.nbytes()
    except _NO_POINTER:
        address = nbytes = -1
    if not tensor.numel():
        return ""
    kind = type(tensor).__name__
    if nbytes == 0:
        return "its memory has been freed (as FSDP does between two forwards): gather or materialize it first"
    if address <= 0 and type(tensor) is torch.Tensor:
        return "it has no memory of its own (inside a transform of torch.func, say): use the store outside of it"
    if address <= 0:
        return f"a {kind} wraps other tensors, or is traced, and has no memory of its own: give the tensors inside"
    if (tensor.storage_offset() + _span(tensor)) * tensor.element_size() > nbytes:
        return f"its memory has been shrunk to {nbytes} bytes, which do not hold all of its elements"
    return ""


def _span(tensor: torch.Tensor) -> int:
    """How many elements lie from a tensor's first to its last."""
    if tensor.is_contiguous():
        return tensor.numel()
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
