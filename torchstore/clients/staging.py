"""Copies in the dtype in which tensors are to travel: made once for each state dict, filled anew by each put."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from skipper import dataplane
from skipper.torchstore.algebra.manifest import Path
from skipper.torchstore.errors import MismatchError
from skipper.torchstore.tensors.local_tensors import (
    LocalTensor,
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
from skipper.torchstore.tensors.quantize import SCALE_SUFFIX, BlockFP8, Scales, quantize, scales_of

TransferDtype = torch.dtype | BlockFP8
"""What floating-point tensors are converted to on their way."""


@dataclass(frozen=True, slots=True)
class Staged:
    """Copies of some of a state dict's tensors.

    Attributes:
        mark: Says which state dicts they fit.
        copies: What is put in place of a tensor, by name; tied tensors have one copy.
        scales: Of the copies that are quantized, by the same names.
    """

    mark: tuple[Any, ...]
    copies: Mapping[str, torch.Tensor]
    scales: Mapping[str, Scales]

    @torch.no_grad()
    def fill(self, leaves: Mapping[str, Any]) -> dict[str, Any]:
        """Convert the tensors as they are now, each once; the leaves with copies in their places, and the scales."""
        done: set[int] = set()
        for name, copy in self.copies.items():
            into, values = local_of(copy), local_of(leaves[name])
            if into.data_ptr() in done:
                continue
            done.add(into.data_ptr())
            if name in self.scales:
                quantize(values, into, self.scales[name].local.tensor, self.scales[name].block)
            else:
                into.copy_(values)
        return {**leaves, **self.copies, **{scale.name: scale.local.tensor for scale in self.scales.values()}}

    def paths(self, paths: Mapping[str, Path]) -> dict[str, Path]:
        """Where the leaves that `fill` gives belong: each tensor's scales beside it."""
        beside = {s.name: (*paths[n][:-1], f"{paths[n][-1]}{SCALE_SUFFIX}") for n, s in self.scales.items()}
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
            BlockAlignmentError: A shard cuts the blocks in which it is to be quantized.
            MismatchError: A tensor has the name under which another one's scales are stored.
        """
        mark = (dtype, everything, tuple((name, _shape(leaf)) for name, leaf in leaves.items()))
        found = self._staged.get(key)
        if found is None or found.mark != mark:
            found = self._staged[key] = _make(key, mark, leaves, dtype, everything)
        return found

    def forget(self, key: str) -> None:
        """Let go of a key's copies."""
        self._staged.pop(key, None)

    def close(self) -> None:
        """Let go of all copies."""
        self._staged.clear()


def check_transfer_dtype(dtype: object) -> None:
    """Raise TypeError or ValueError for what no floating-point tensor can be converted to on its way."""
    if isinstance(dtype, BlockFP8):
        return
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"transfer_dtype is a torch.dtype or a BlockFP8, not {dtype!r}")
    if not dtype.is_floating_point:
        raise ValueError(f"transfer_dtype is a floating-point dtype, not {dtype}: other tensors travel as they are")


def _make(key: str, mark: tuple[Any, ...], leaves: Mapping[str, Any], dtype: TransferDtype, everything: bool) -> Staged:
    copies: dict[str, torch.Tensor] = {}
    scales: dict[str, Scales] = {}
    tied: dict[tuple[Any, ...], torch.Tensor] = {}
    tied_scales: dict[int, LocalTensor] = {}
    for name, leaf in leaves.items():
        if not isinstance(leaf, torch.Tensor):
            continue
        check_dense(memory_of(resolved(leaf)), f"{key}/{name}")
        local = local_of(leaf)
        blocks = dtype if isinstance(dtype, BlockFP8) and dtype.takes(name, leaf) else None
        target = _target(leaf, blocks, dtype)
        if target == leaf.dtype and not everything:
            continue
        place = (local.data_ptr(), tuple(local.shape), local.stride(), local.dtype, is_direct(local), target)
        copy = tied.get(place)
        if copy is None:
            copy = tied[place] = _room(local, target)
        copies[name] = with_local(leaf, copy) if is_dtensor(leaf) else copy
        if blocks is None:
            continue
        if f"{name}{SCALE_SUFFIX}" in leaves:
            raise MismatchError(
                f"{key}/{name}", f"a tensor is named {name + SCALE_SUFFIX!r} already, as its scales would"
            )
        found = tied_scales.get(copy.data_ptr())
        if found is None or not copy.numel():
            found = scales_of(describe(leaf, key=f"{key}/{name}"), blocks.block, key=f"{key}/{name}")
            found = tied_scales[copy.data_ptr()] = replace(found, tensor=_room(found.tensor, torch.float32))
        scales[name] = Scales(f"{name}{SCALE_SUFFIX}", blocks.block, found)
    return Staged(mark, copies, scales)


def _target(leaf: torch.Tensor, blocks: BlockFP8 | None, dtype: TransferDtype) -> torch.dtype:
    """The dtype in which a tensor travels."""
    if blocks is not None:
        return blocks.dtype
    return dtype if isinstance(dtype, torch.dtype) and leaf.is_floating_point() else leaf.dtype


def _room(local: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if math.prod(local.shape) == 0:  # an empty shard needs no memory, and there is no empty shared memory
        return torch.empty(local.shape, dtype=dtype, device=local.device)
    return dataplane.empty(tuple(local.shape), dtype, device=str(local.device))


def _shape(leaf: Any) -> tuple[Any, ...]:
    """What decides whether a staged copy fits a leaf."""
    if not isinstance(leaf, torch.Tensor):
        return ()
    if why_not_dense(memory_of(resolved(leaf))):
        return (type(leaf),)  # to be refused
    local = local_of(leaf)
    # The address tells tied tensors from others; a temporary that comes elsewhere each time just gets new room.
    place = (local.data_ptr(), local.shape, local.stride(), local.dtype, local.device, is_direct(local))
    return (*place, leaf.shape, leaf.placements, leaf.device_mesh) if is_dtensor(leaf) else place
