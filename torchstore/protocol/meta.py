"""The description of a stored value, without its bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch

from skipper.torchstore.algebra.layout import Ints
from skipper.torchstore.tensors.values import dtype_named


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """One stored tensor as a whole, however it is sharded.

    The example of `ValueMeta` shows one.

    Attributes:
        dtype: The dtype as torch prints it: ``"torch.bfloat16"``.
        shape: The shape of the whole tensor.
    """

    dtype: str
    shape: Ints

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        return dtype_named(self.dtype)


@dataclass(frozen=True, slots=True)
class ValueMeta:
    """The description of one version of a key.

    Attributes:
        version: Its number.
        versions: All versions that can be read now, oldest first.
        kind: What `get` or `get_state_dict` would return.
        mode: Where the bytes are: in a message to the controller, in a volume, or in the memory of the publishers.
        tensors: The tensors by name; a plain tensor has the only name "".
        objects: Names of the entries that are not tensors.
        publishers: How many processes have put parts of it.
        volumes: For each of them, in the order of their ranks, the volumes that hold its part now: one for each copy.
            Empty in direct mode, for a value in a message, and for a part without tensors.

    Example:
        ```python
        import torch

        from skipper import torchstore
        from skipper.torchstore import sync as ts

        ts.initialize()
        ts.put_state_dict({"w": torch.ones(4, 2)}, "policy")
        meta: torchstore.ValueMeta = ts.get_meta("policy")
        tensor: torchstore.TensorMeta = meta.tensors["w"]
        print(meta.version, meta.kind, tensor.shape, tensor.dtype, meta.nbytes)  # 1 state_dict (4, 2) torch.float32 32
        ts.shutdown()
        ```
    """

    key: str
    version: int
    versions: tuple[int, ...]
    kind: Literal["tensor", "object", "state_dict"]
    mode: Literal["inline", "snapshot", "direct"]
    tensors: Mapping[str, TensorMeta]
    objects: tuple[str, ...]
    publishers: int
    volumes: tuple[tuple[str, ...], ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, each counted once."""
        return sum(tensor.nbytes for tensor in self.tensors.values())
