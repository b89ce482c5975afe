"""What the publishers of a version have said of it, summed up for readers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from skipper.torchstore.algebra.manifest import Manifest, Mode
from skipper.torchstore.controller.version import Version
from skipper.torchstore.protocol.meta import TensorMeta, ValueMeta
from skipper.torchstore.tensors.values import open_inline


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
