"""A publisher's data for a certificate: the tiles of its tensors, as they are stored and in other dtypes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from skipper.torchstore.algebra.layout import Box
from skipper.torchstore.algebra.manifest import TensorItem
from skipper.torchstore.tensors.cells import region
from skipper.torchstore.tensors.landing import write_values
from skipper.torchstore.tensors.local_tensors import LocalTensor, same_elements
from skipper.torchstore.tensors.packing import Packed
from skipper.torchstore.tensors.tiles import TensorsTiles, TensorTiles, TileKey, hashing_threads, take_tiles
from skipper.torchstore.tensors.values import dtype_named

Certify = bool | tuple[torch.dtype, ...]
"""Whether a put is certified, or in which dtypes in addition to the stored ones."""


def check_certify(certify: object) -> tuple[torch.dtype, ...] | None:
    """The dtypes in ``certify`` in addition to the stored ones; None: nothing is certified.

    Raises:
        TypeError: It is neither True or False nor a tuple of dtypes.
        ValueError: One of them is not a floating-point dtype.
    """
    if isinstance(certify, bool):
        return () if certify else None
    if not isinstance(certify, tuple) or not all(isinstance(form, torch.dtype) for form in certify):
        raise TypeError(f"certify is True, False, or a tuple of dtypes that readers convert to, not {certify!r}")
    for form in certify:
        if not form.is_floating_point:
            raise ValueError(
                f"certify: only floating-point tensors are converted, and {form} is not a floating-point dtype"
            )
    return tuple(dict.fromkeys(certify))


@torch.no_grad()
def certifiable_tiles(packed: Packed, forms: Sequence[torch.dtype]) -> TensorsTiles:
    """Hash the tiles of a publisher's tensors as they are now.

    Args:
        packed: The tensors. In snapshot mode, replicas that other ranks store are left out.
        forms: The dtypes of readers; floating-point tensors are also certified in each of them, quantized tensors by
        their values.
    """
    found: dict[TileKey, TensorTiles] = {}
    same: dict[tuple[Any, ...], TensorTiles] = {}
    with hashing_threads() as threads:
        for name, item in packed.manifest.tensors.items():
            local = packed.tensors[name]
            is_number = item.scaled is not None or dtype_named(item.dtype).is_floating_point
            others = [form for form in forms if is_number and form != dtype_named(item.dtype)]
            for form in (None, *others):
                key = (*same_elements(local.tensor), item.dtype, form, item.global_shape, item.pieces, item.scaled)
                if key not in same:  # tied tensors are hashed once
                    shape = item.global_shape if form is None else item.value_shape
                    blocks, fragments = take_tiles(_parts(item, local, packed.tensors, form), shape, threads)
                    as_dtype = item.dtype if form is None else str(form)
                    same[key] = TensorTiles(as_dtype, shape, blocks, fragments, item.scaled is not None)
                found[name, "" if form is None else str(form)] = same[key]
    return found


def _parts(
    item: TensorItem, local: LocalTensor, tensors: Mapping[str, LocalTensor], form: torch.dtype | None
) -> Iterator[tuple[Box, torch.Tensor]]:
    """A process' boxes of a tensor, with their elements in a form."""
    for number, piece in enumerate(item.pieces):
        if form is None or item.scaled is None:
            values = region(local.tensor, piece.local, piece.box.shape)
            yield piece.box, values if form is None else values.to(form)
        else:
            box, scaled = item.value_box(piece.box), item.scaled
            converted = torch.empty(box.shape, dtype=form, device=local.tensor.device)
            whole = tensors[scaled.tensor_scale] if scaled.tensor_scale else None
            write_values(scaled, (local, tensors[scaled.scales], whole), number, (0,) * len(box.shape), converted)
            yield box, converted
