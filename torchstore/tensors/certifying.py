"""What a publisher says of a version that is to be certified: tiles of its tensors, as stored and otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from skipper.torchstore.algebra.layout import Box
from skipper.torchstore.algebra.manifest import TensorItem
from skipper.torchstore.tensors.cells import region
from skipper.torchstore.tensors.local_tensors import LocalTensor, same_elements
from skipper.torchstore.tensors.packing import Packed
from skipper.torchstore.tensors.quantize import dequantize
from skipper.torchstore.tensors.tiles import TensorsTiles, TensorTiles, TileKey, hashing_threads, take_tiles
from skipper.torchstore.tensors.values import dtype_named

Certify = bool | tuple[torch.dtype, ...]
"""Whether a put is certified, or in which dtypes beside the stored ones."""


def check_certify(certify: object) -> tuple[torch.dtype, ...] | None:
    """The dtypes that ``certify`` names beside the stored ones; None: nothing is certified.

    Raises:
        TypeError: It is neither True nor False nor a tuple of dtypes.
        ValueError: One of them is of no floating-point numbers.
    """
    if isinstance(certify, bool):
        return () if certify else None
    if not isinstance(certify, tuple) or not all(isinstance(form, torch.dtype) for form in certify):
        raise TypeError(f"certify is True, False, or a tuple of dtypes that readers convert to, not {certify!r}")
    for form in certify:
        if not form.is_floating_point:
            raise ValueError(f"certify: only floating-point tensors are converted, and {form} is none")
    return tuple(dict.fromkeys(certify))


@torch.no_grad()
def certifiable_tiles(packed: Packed, forms: Sequence[torch.dtype]) -> TensorsTiles:
    """Take the tiles of a publisher's tensors as they are now.

    Args:
        packed: The tensors. Of replicas in snapshot mode, which others store, nothing is taken.
        forms: Dtypes that readers will have; tensors of floating-point numbers are certified in each of them as well,
            quantized ones by their values.
    """
    found: dict[TileKey, TensorTiles] = {}
    same: dict[tuple[Any, ...], TensorTiles] = {}
    with hashing_threads() as threads:
        for name, item in packed.manifest.tensors.items():
            local = packed.tensors[name]
            scales = packed.tensors[item.scales] if item.scales else None
            dtype = dtype_named(item.dtype)
            others = [form for form in forms if dtype.is_floating_point and form != dtype]
            for form in (None, *others):
                key = (*same_elements(local.tensor), dtype, form, item.global_shape, item.pieces, scales is None)
                if key not in same:  # tied tensors are hashed once
                    blocks, fragments = take_tiles(_parts(item, local, scales, form), item.global_shape, threads)
                    as_dtype = item.dtype if form is None else str(form)
                    same[key] = TensorTiles(as_dtype, item.global_shape, blocks, fragments, scales is not None)
                found[name, "" if form is None else str(form)] = same[key]
    return found


def _parts(
    item: TensorItem, local: LocalTensor, scales: LocalTensor | None, form: torch.dtype | None
) -> Iterator[tuple[Box, torch.Tensor]]:
    """The boxes that a process holds of a tensor, with their elements in a form."""
    for number, piece in enumerate(item.pieces):
        values = region(local.tensor, piece.local, piece.box.shape)
        if form is not None and scales is not None:
            lines = scales.pieces[number]
            converted = torch.empty(values.shape, dtype=form, device=values.device)
            dequantize(values, region(scales.tensor, lines.local, lines.box.shape), item.block, (0, 0), converted)
            values = converted
        elif form is not None:
            values = values.to(form)
        yield piece.box, values
