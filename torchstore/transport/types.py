"""`TensorSlice`, and the `Request` that says which part of a tensor a process holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from skipper.torchstore.algebra.slices import TensorSlice
from skipper.torchstore.errors import LayoutMismatchError
from skipper.torchstore.tensors.local_tensors import describe, is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class Request:
    """A value to be put or filled, with the part of a tensor that it is.

    Attributes:
        key: The key of the value.
        tensor_val: The local tensor; None for an object.
        tensor_slice: Which part of the global tensor it is; None for the whole tensor.
        objects: The value, if it is not a tensor.

    Example:
        ```python
        import torch

        from skipper.torchstore.transport import Request

        request = Request.from_any("w", torch.ones(4))
        print(request.key, request.is_object)  # w False
        ```
    """

    key: str
    tensor_val: torch.Tensor | None = None
    tensor_slice: TensorSlice | None = None
    objects: object = None

    @property
    def is_object(self) -> bool:
        """Whether the value is not a tensor."""
        return self.tensor_val is None and self.objects is not None

    @classmethod
    def from_any(cls, key: str, value: object, tensor_slice: TensorSlice | None = None) -> Request:
        """Describe a value.

        Raises:
            ValueError: A slice is given with a DTensor, which has its own, or it has another shape than the tensor.
        """
        if is_dtensor(value):
            if tensor_slice is not None:
                raise ValueError("a DTensor knows its own slice: do not pass tensor_slice")
            return cls(key, value.to_local(), slice_of(value))
        if isinstance(value, torch.Tensor):
            if tensor_slice is not None and tensor_slice.local_shape != tuple(value.shape):
                raise ValueError(f"the slice has the shape {tensor_slice.local_shape}, the tensor {tuple(value.shape)}")
            return cls(key, value, tensor_slice)
        return cls(key, None, tensor_slice, value)


def slice_of(dtensor: DTensor) -> TensorSlice:
    """The part of a DTensor that this rank holds.

    Raises:
        LayoutMismatchError: (a `ValueError`) it holds several blocks of the tensor, or none, which a slice cannot
        describe.
        UnsupportedPlacementError: (a `ValueError`) a placement is Partial.
    """
    local = describe(dtensor, key="the tensor")
    if len(local.pieces) != 1:
        raise LayoutMismatchError("", f"this rank holds {len(local.pieces)} blocks of {tuple(dtensor.placements)}")
    mesh, (piece,) = dtensor.device_mesh, local.pieces
    return TensorSlice(
        piece.box.offsets, mesh.get_coordinate(), tuple(dtensor.shape), piece.box.shape, tuple(mesh.shape)
    )


__all__ = ["Request", "TensorSlice", "slice_of"]
