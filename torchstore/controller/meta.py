"""What is stored under a key, without the bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch

from skipper.torchstore.algebra.layout import Ints
from skipper.torchstore.algebra.manifest import Manifest, Mode
from skipper.torchstore.algebra.values import dtype_named, open_inline
from skipper.torchstore.controller.version import Version


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """One stored tensor as a whole, however it is sharded.

    Attributes:
        dtype: As torch prints it: ``"torch.bfloat16"``.
        shape: Of the whole tensor.
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
    """What one version of a key holds.

    Attributes:
        version: Which one.
        versions: All that can be read now, oldest first.
        kind: What `get` or `get_state_dict` would return.
        mode: Where the bytes are: in a message to the controller, in a volume, or with the publishers.
        tensors: By name; a plain tensor has the only name "".
        objects: Names of the entries that are not tensors.
        publishers: How many processes have put parts of it.
        volumes: For each of them, in the order of their ranks, the volumes that hold its part now: one for each copy.
            No volume does in direct mode, of a value in a message, and of a part without tensors.
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


def describe_version(key: str, version: Version, versions: tuple[int, ...], item: str) -> ValueMeta:
    """Sum up what the publishers of a version have said of it.

    Args:
        key: As it was asked for.
        version: A ready one.
        versions: All readable ones of the key.
        item: The entry that ``key`` means inside a state dict; "" for the whole.
    """
    tensors: dict[str, TensorMeta] = {}
    objects: dict[str, None] = {}
    first, *_ = contributions = list(version.contributions.values())
    if first.inline:
        inline = open_inline(first.inline)
        if inline.dtype:
            tensors[""] = TensorMeta(inline.dtype, inline.shape)
        return ValueMeta(key, version.number, versions, _kind(tensors), "inline", tensors, (), 1)
    manifests = [contribution.manifest for contribution in contributions if contribution.manifest is not None]
    for manifest in manifests:
        tensors.update(_tensors(manifest, item))
        objects.update(dict.fromkeys(name for name in manifest.objects if not item or name == item))
    mode: Mode = next((binding.mode for _, binding in version.bindings()), "snapshot")
    whole = manifests[0].kind == "state_dict" and not item
    kind = "state_dict" if whole else _kind(tensors)
    volumes = tuple(
        tuple(holder.volume for holder in version.contributions[at].holders if holder.volume)
        for at in sorted(version.contributions)
    )
    return ValueMeta(key, version.number, versions, kind, mode, tensors, tuple(objects), len(contributions), volumes)


def _kind(tensors: Mapping[str, TensorMeta]) -> Literal["tensor", "object"]:
    return "tensor" if tensors else "object"


def _tensors(manifest: Manifest, item: str) -> Iterator[tuple[str, TensorMeta]]:
    for name, stored in manifest.tensors.items():
        if not stored.pickled and (not item or name == item):
            yield ("" if item else name), TensorMeta(stored.dtype, stored.global_shape)
