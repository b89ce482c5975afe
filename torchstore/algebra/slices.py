"""`TensorSlice`: a rectangular part of a tensor, given explicitly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, SupportsInt, cast


@dataclass(frozen=True)
class TensorSlice:
    """A block of a tensor of ``global_shape``: ``local_shape`` elements from ``offsets`` on.

    ``coordinates`` and ``mesh_shape`` say which rank of which mesh the slice belongs to; a read needs neither.

    Raises:
        ValueError: The numbers of dims differ, or the slice reaches out of the tensor.

    Example:
        ```python
        import torch

        from skipper import torchstore
        from skipper.torchstore import sync as ts

        ts.initialize()
        ts.put("w", torch.arange(12.0).reshape(4, 3))
        rows = torchstore.TensorSlice(offsets=(1, 0), global_shape=(4, 3), local_shape=(2, 3))
        print(ts.get("w", tensor_slice_spec=rows).tolist())  # [[3.0, 4.0, 5.0], [6.0, 7.0, 8.0]]
        ts.shutdown()
        ```
    """

    offsets: tuple[int, ...]
    coordinates: tuple[int, ...]
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    mesh_shape: tuple[int, ...]

    def __init__(
        self,
        offsets: Sequence[int],
        coordinates: Sequence[int] | None = (),
        global_shape: Sequence[int] = (),
        local_shape: Sequence[int] = (),
        mesh_shape: Sequence[int] = (),
    ) -> None:
        given: dict[str, Any] = {
            "offsets": offsets,
            "coordinates": coordinates or (),
            "global_shape": global_shape,
            "local_shape": local_shape,
            "mesh_shape": mesh_shape,
        }
        for name, numbers in given.items():
            object.__setattr__(self, name, tuple(_whole(name, number) for number in numbers))
        if not len(self.offsets) == len(self.global_shape) == len(self.local_shape):
            raise ValueError(f"offsets, global_shape and local_shape of {self} need one number for each dim")
        for start, size, whole in zip(self.offsets, self.local_shape, self.global_shape, strict=True):
            if start < 0 or size < 0 or start + size > whole:
                raise ValueError(f"{self} reaches out of the tensor")


def _whole(name: str, number: object) -> int:
    """A number of bytes or elements, of any integer type."""
    if isinstance(number, float) and not number.is_integer():
        raise ValueError(f"{name} holds whole numbers, not {number!r}")
    try:
        return int(cast(SupportsInt, number))
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} holds whole numbers, not {type(number).__name__}") from error
