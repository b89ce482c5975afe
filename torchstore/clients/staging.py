"""Copies in the dtype in which tensors are sent: made once for each state dict, filled again by each put."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from skipper import dataplane
from skipper.torchstore.algebra.layout import Ints
from skipper.torchstore.algebra.manifest import Path
from skipper.torchstore.errors import MismatchError
from skipper.torchstore.tensors.local_tensors import (
    check_dense,
    describe,
    is_direct,
    is_dtensor,
    local_of,
    memory_of,
    resolved,
    why_not_dense,
    with_local,
)
from skipper.torchstore.tensors.quantization import Quantization, Quantized, room_for

TransferDtype = torch.dtype | Quantization
"""The format to which floating-point tensors are converted before they are sent."""


@dataclass(frozen=True, slots=True)
class Staged:
    """Copies of some of a state dict's tensors.

    Attributes:
        mark: Identifies the state dicts that they fit.
        copies: The copies that are put in place of tensors, by name; tied tensors have one copy.
        quantized: Elements and scales that are put in place of tensors, by name; tied tensors have the same memory.
    """

    mark: tuple[Any, ...]
    copies: Mapping[str, torch.Tensor]
    quantized: Mapping[str, Quantized]

    @torch.no_grad()
    def fill(self, leaves: Mapping[str, Any], dtype: TransferDtype) -> dict[str, Any]:
        """Convert the tensors as they are now, each once; the leaves with copies in their places, and the scales.

        ``dtype`` equals that for which the room was made.
        """
        done: set[int] = set()
        filled = {**leaves, **self.copies}
        for name, copy in self.copies.items():
            into, values = local_of(copy), local_of(leaves[name])
            if into.data_ptr() not in done:
                done.add(into.data_ptr())
                into.copy_(values)
        for name, made in self.quantized.items():
            address = made.elements.tensor.data_ptr()
            if address not in done and isinstance(dtype, Quantization):
                done.add(address)
                made.fill(name, local_of(leaves[name]), dtype)
            filled.update(made.stored(name))
        return filled

    def paths(self, paths: Mapping[str, Path]) -> dict[str, Path]:
        """The paths of the leaves that `fill` returns: each tensor's scales have their own."""
        beside = {
            stored: (*paths[name][:-1], f"{paths[name][-1]}{stored.removeprefix(name)}")
            for name, made in self.quantized.items()
            for stored in made.item.beside()
        }
        return {**paths, **beside}


class Staging:
    """The staged copies of one publisher, by key."""

    def __init__(self) -> None:
        self._staged: dict[str, Staged] = {}

    def of(self, key: str, leaves: Mapping[str, Any], dtype: TransferDtype, *, everything: bool) -> Staged:
        """Room for a state dict; the same as last time if it fits.

        Floating-point tensors become ``dtype``, others keep theirs. ``everything``: copy also what has that dtype
        already, so that nothing of the original is published.

        Raises:
            BlockAlignmentError: A shard cuts the blocks in which it would be quantized.
            MismatchError: A tensor has the name under which another one's scales are stored.
        """
        mark = (dtype, everything, tuple((name, _shape(leaf)) for name, leaf in leaves.items()))
        found = self._staged.get(key)
        if found is None or found.mark != mark:
            found = self._staged[key] = _make(key, mark, leaves, dtype, everything)
        return found

    def forget(self, key: str) -> None:
        """Release a key's copies."""
        self._staged.pop(key, None)

    def close(self) -> None:
        """Release all copies."""
        self._staged.clear()


def check_transfer_dtype(dtype: object) -> None:
    """Raise TypeError or ValueError for a format to which no floating-point tensor can be converted."""
    if isinstance(dtype, Quantization):
        return
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"transfer_dtype is a torch.dtype, or a BlockFP8, MXFP8 or NVFP4, not {dtype!r}")
    if not dtype.is_floating_point:
        raise ValueError(f"transfer_dtype is a floating-point dtype, not {dtype}: other tensors are sent unchanged")


def _make(key: str, mark: tuple[Any, ...], leaves: Mapping[str, Any], dtype: TransferDtype, everything: bool) -> Staged:
    copies: dict[str, torch.Tensor] = {}
    quantized: dict[str, Quantized] = {}
    tied: dict[tuple[Any, ...], torch.Tensor] = {}
    rooms: dict[tuple[Any, ...], torch.Tensor] = {}

    def room(place: tuple[Any, ...], device: torch.device, shape: Ints, dtype: torch.dtype) -> torch.Tensor:
        at = (place, shape, dtype)  # elements and scales differ in dtype; those of tied tensors do not
        if at not in rooms:
            rooms[at] = _room(shape, dtype, device)
        return rooms[at]

    for name, leaf in leaves.items():
        if not isinstance(leaf, torch.Tensor):
            continue
        check_dense(memory_of(resolved(leaf)), f"{key}/{name}")
        local = local_of(leaf)
        place = (local.data_ptr(), tuple(local.shape), local.stride(), local.dtype, is_direct(local))
        if isinstance(dtype, Quantization) and dtype.takes(name, leaf):
            where = f"{key}/{name}"
            described = describe(leaf, key=where)
            quantized[name] = room_for(dtype, name, described, partial(room, place, local.device), where)
            for stored in quantized[name].item.beside():
                if stored in leaves:
                    raise MismatchError(where, f"a tensor is named {stored!r} already, which its scales need")
            continue
        target = dtype if isinstance(dtype, torch.dtype) and leaf.is_floating_point() else leaf.dtype
        if target == leaf.dtype and not everything:
            continue
        copy = tied.get(place)
        if copy is None:
            copy = tied[place] = _room(tuple(local.shape), target, local.device)
        copies[name] = with_local(leaf, copy) if is_dtensor(leaf) else copy
    return Staged(mark, copies, quantized)


def _room(shape: Ints, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if math.prod(shape) == 0:  # an empty shard needs no memory, and there is no empty shared memory
        return torch.empty(shape, dtype=dtype, device=device)
    return dataplane.empty(shape, dtype, device=str(device))


def _shape(leaf: Any) -> tuple[Any, ...]:
    """The key that decides whether a staged copy fits a leaf."""
    if not isinstance(leaf, torch.Tensor):
        return ()
    if why_not_dense(memory_of(resolved(leaf))):
        return (type(leaf),)  # to be refused
    local = local_of(leaf)
    # The address tells tied tensors from others; a temporary that comes elsewhere each time just gets new room.
    place = (local.data_ptr(), local.shape, local.stride(), local.dtype, local.device, is_direct(local))
    return (*place, leaf.shape, leaf.placements, leaf.device_mesh) if is_dtensor(leaf) else place
