"""Torch's tensors in the store's terms: the only file here that looks inside a DTensor.

A `LocalTensor` describes this process' part of a tensor: the memory, and the boxes of the global tensor in it.
`fingerprint` is a cheap test whether a state dict is still the same as last time (same names, addresses, strides,
dtypes and placements), so that plans and registrations are used again.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch.nn.parameter import is_lazy

from skipper.torchstore.algebra.layout import Box, Ints, Layout, Piece, Placement, Replicate, Shard, StridedShard
from skipper.torchstore.algebra.slices import TensorSlice
from skipper.torchstore.errors import LayoutMismatchError, UnsupportedPlacementError
from skipper.torchstore.tensors.overlap import overlaps_itself

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
from skipper.torchstore.errors import KindMismatchError


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether it is a DTensor.

    Importing DTensor takes as long as importing half of torch; if nobody has imported it, no tensor can be one.
    """
    return isinstance(value, dtensor_type())


def dtensor_type() -> type[DTensor] | tuple[()]:
    """For `isinstance` with many values: the lookup costs more than the test."""
    found: type[DTensor] | tuple[()] = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    return found


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """The part of a tensor in this process' memory.

    Attributes:
        tensor: The local elements, detached; shares memory with the user's tensor.
        global_shape: The shape of the whole tensor.
        pieces: The boxes of the whole tensor, with their places in ``tensor``.
        layout: The placements behind the pieces; None for a slice given by hand.
        coordinate: This rank's place in the mesh of the layout.
    """

    tensor: torch.Tensor
    global_shape: Ints
    pieces: tuple[Piece, ...]
    layout: Layout | None = None
    coordinate: Ints = ()


def describe(value: torch.Tensor | LocalTensor, *, key: str) -> LocalTensor:
    """Describe which boxes of the global tensor this process holds, and where.

    Args:
        value: A plain tensor (then it is the whole tensor), a DTensor (then its local shard counts), or a part that has
            been described already.
        key: Named in errors.

    Raises:
        UnsupportedPlacementError: A DTensor with a Partial or an unknown placement.
        LayoutMismatchError: The local tensor does not have the shape that its placements say.
        KindMismatchError: Not a dense tensor with its own memory (sparse, quantized, meta, conjugate view).
    """
    if isinstance(value, LocalTensor):
        check_dense(value.tensor, key)
        return value
    if not is_dtensor(value):
        check_dense(value, key)
        shape = tuple(value.shape)
        return LocalTensor(value.detach(), shape, Layout(shape).pieces(()), Layout(shape))
    with torch.no_grad():
        local = value.to_local()
    check_dense(local, key)
    layout = Layout(
        tuple(value.shape),
        tuple(value.device_mesh.shape),
        tuple(_placement(placement, value.ndim, key) for placement in value.placements),
    )
    coordinate = value.device_mesh.get_coordinate()
    if coordinate is None:  # this process is not part of the mesh and holds nothing
        return LocalTensor(local.detach(), layout.global_shape, (), layout)
    at = tuple(coordinate)
    if tuple(local.shape) != layout.local_shape(at):
        raise LayoutMismatchError(
            key,
            f"the local tensor at {at} has shape {tuple(local.shape)}, but {value.placements} over a mesh of "
            f"shape {layout.mesh_shape} puts {layout.local_shape(at)} of {layout.global_shape} there; for uneven "
            "shards give DTensor.from_local the whole shape= and stride=, and cut as torch.chunk does",
        )
    return LocalTensor(local.detach(), layout.global_shape, layout.pieces(at), layout, at)


def describe_slice(value: torch.Tensor, spec: TensorSlice, *, key: str) -> LocalTensor:
    """A plain tensor as the destination of one slice of a larger one.

    Raises:
        LayoutMismatchError: The shapes of tensor and slice differ.
    """
    if is_dtensor(value):
        raise LayoutMismatchError(key, "a DTensor already says which slice it holds: do not pass a slice with it")
    check_dense(value, key)
    if tuple(value.shape) != spec.local_shape:
        raise LayoutMismatchError(key, f"the slice has shape {spec.local_shape}, the given tensor {tuple(value.shape)}")
    box = Box(spec.offsets, spec.local_shape)
    pieces = (Piece(box, (0,) * len(spec.local_shape)),) if box.numel else ()
    return LocalTensor(value.detach(), spec.global_shape, pieces)


def _placement(placement: Any, ndim: int, key: str) -> Placement:
    from torch.distributed.tensor import Replicate as TorchReplicate
    from torch.distributed.tensor import Shard as TorchShard
    from torch.distributed.tensor.placement_types import _StridedShard as TorchStridedShard

    if isinstance(placement, TorchStridedShard):  # before Shard: in older versions it is a subclass of it
        return StridedShard(placement.dim % ndim, int(placement.split_factor))
    if isinstance(placement, TorchShard):
        return Shard(placement.dim % ndim)
    if isinstance(placement, TorchReplicate):
        return Replicate()
    raise UnsupportedPlacementError(
        key,
        f"{placement} cannot be stored or read into: ranks hold summands of the tensor, not parts of it; "
        "redistribute to Shard or Replicate first",
    )


def check_destination(tensor: torch.Tensor, key: str) -> None:
    """Refuse a destination whose elements share memory.

    Raises:
        LayoutMismatchError: The tensor was made by ``expand``, or overlaps itself in another way.
    """
    if not tensor.is_contiguous() and overlaps_itself(tensor.shape, tensor.stride()):
        raise LayoutMismatchError(
            key, "cannot write into an expanded tensor, or one that overlaps itself: several elements share memory"
        )


def local_of(value: torch.Tensor) -> torch.Tensor:
    """This process' part of a tensor: itself, or a DTensor's local shard; detached, over the same memory."""
    if not is_dtensor(value):
        return value.detach()
    with torch.no_grad():
        local: torch.Tensor = value.to_local()
    return local.detach()


def check_writable(value: torch.Tensor, key: str) -> None:
    """Refuse a tensor into which nothing can be read, for any stored value.

    Raises:
        KindMismatchError: It has no dense memory of its own.
        LayoutMismatchError: Its elements share memory.
    """
    memory = memory_of(value)
    check_dense(memory, key)
    check_destination(memory, key)


def memory_of(value: torch.Tensor) -> torch.Tensor:
    """The tensor with the memory, not detached: itself, or the local tensor of a DTensor."""
    return value._local_tensor if is_dtensor(value) else value


def locals_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The local tensors of those that are DTensors."""
    distributed = dtensor_type()
    return [tensor._local_tensor for tensor in tensors if isinstance(tensor, distributed)]


def resolved(value: torch.Tensor) -> torch.Tensor:
    """The tensor itself; a copy with its own memory if it is a lazy conjugate or negation."""
    memory = memory_of(value)
    if is_lazy(memory) or is_direct(memory):
        return value
    copy = memory.detach().resolve_conj().resolve_neg()
    return with_local(value, copy) if is_dtensor(value) else copy


def with_local(value: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor with the same mesh, placements and global shape over another local tensor."""
    return _Distribution.of(value).over(local)


@dataclass(frozen=True, slots=True)
class _Distribution:
    """A DTensor without its local tensor."""

    kind: type[DTensor]
    mesh: DeviceMesh
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: Ints

    @staticmethod
    def of(value: DTensor) -> _Distribution:
        return _Distribution(type(value), value.device_mesh, value.placements, value.shape, value.stride())

    def over(self, local: torch.Tensor) -> DTensor:
        return self.kind.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )


class BorrowedTensor:
    """A tensor that is available as long as other code keeps its memory alive.

    The memory counts, not the object: ``module.state_dict()`` returns new tensors over the same memory each time.

    A lazy conjugate or negation is kept alive.
    """

    def __init__(self, value: torch.Tensor) -> None:
        local = memory_of(value).detach()
        self._kept = None if is_direct(local) else value
        self._storage = weakref.ref(local.untyped_storage())
        self._nbytes = local.untyped_storage().nbytes()
        self._kind = (local.dtype, local.device)
        self._place = (local.storage_offset(), local.shape, local.stride())
        self._dtensor = _Distribution.of(value) if is_dtensor(value) else None

    def tensor(self) -> torch.Tensor | None:
        """A tensor over the same memory; None if that was freed or shrunk."""
        storage = self._storage()
        if self._kept is not None or storage is None or storage.nbytes() < self._nbytes:
            return self._kept
        dtype, device = self._kind
        local = torch.empty(0, dtype=dtype, device=device).set_(storage, *self._place)
        return local if self._dtensor is None else self._dtensor.over(local)


def is_plain(value: object) -> TypeGuard[torch.Tensor]:
    """Whether it is a whole dense tensor of torch's own type with its own memory."""
    return (type(value) is torch.Tensor or type(value) is torch.nn.Parameter) and not why_not_dense(value)


def same_elements(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for dense tensors over exactly the same elements in the same order, under any names."""
    if tensor.is_contiguous():
        return tensor.device, tensor.data_ptr(), tensor.nbytes
    return tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.element_size()


def storage_of(tensor: torch.Tensor) -> torch.Tensor:
    """All the memory behind a tensor as one flat byte tensor; it shares that memory and keeps it alive."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage())


class Fingerprint(tuple[Any, ...]):
    """The result of `fingerprint`: a tuple that keeps its hash, which costs a quarter as much to compute."""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()


def fingerprint(leaves: Mapping[str, Any]) -> Fingerprint:
    """Equal for two state dicts whose tensors have the same layout in the same memory.

    A tensor that `describe` would refuse equals no other, so that it is not confused with a tensor at the same address.
    Costs about a microsecond for each tensor: that is the remaining cost per tensor of a warm put or get.
    """
    distributed = dtensor_type()
    marks: list[Any] = []
    for name, value in leaves.items():
        if not isinstance(value, torch.Tensor):
            marks += (name, _mark_of(value) if isinstance(value, LocalTensor) else None)
            continue
        local = value._local_tensor if isinstance(value, distributed) else value
        try:
            dtype, address = local.dtype, local.data_ptr()
            if local.is_neg() or not address or (dtype.is_complex and local.is_conj()):
                check_dense(local, name)  # an empty tensor is accepted
            marks += (name, address, local.shape, local.stride(), dtype)
        except _UNLIKE_ANY:
            marks += (name, next(_numbers))
        if isinstance(value, distributed):
            marks += (value.shape, value.placements, value.device_mesh)
    return Fingerprint(marks)


def _mark_of(part: LocalTensor) -> tuple[Any, ...]:
    local = part.tensor
    return local.data_ptr(), local.shape, local.stride(), local.dtype, part.global_shape, part.pieces


_UNLIKE_ANY = (RuntimeError, NotImplementedError, ValueError)  # no address, or one whose bytes are not the elements
_numbers = count()


_NO_POINTER = (RuntimeError, NotImplementedError, ValueError)  # torch raises this if there is no address


def check_dense(tensor: torch.Tensor, key: str) -> None:
    """Refuse a tensor whose elements are not stored unchanged in its own memory.

    Raises:
        KindMismatchError: The message says which kind of tensor it is, and what to give instead.
    """
    reason = why_not_dense(tensor)
    if reason:
        raise KindMismatchError(key, reason)


def why_not_dense(tensor: torch.Tensor) -> str:
    """The reason why a tensor's bytes can be neither stored nor filled; empty if they can.

    For a DTensor, pass its local tensor. Costs a microsecond or two, and reads no element.
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
    """Whether the bytes at a strided tensor's address are its elements: it is not a lazy conjugate or negation."""
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
    """The number of elements in memory from a tensor's first to its last."""
    if tensor.is_contiguous():
        return tensor.numel()
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
