"""Copies in the dtype in which tensors are to travel: made once for each state dict, filled anew by each put."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

import dataplane
from torchstore.tensors import is_dtensor, local_of, with_local


@dataclass(frozen=True, slots=True)
class Staged:
    """Copies of some of a state dict's tensors.

    Attributes:
        mark: Says which state dicts they fit.
        copies: What is put in place of a tensor, by name; tied tensors have one copy.
    """

    mark: tuple[Any, ...]
    copies: Mapping[str, torch.Tensor]

    @torch.no_grad()
    def fill(self, leaves: Mapping[str, Any]) -> dict[str, Any]:
        """Convert the tensors as they are now, each once; the leaves with the copies in their places."""
        done: set[int] = set()
        for name, copy in self.copies.items():
            into = local_of(copy)
            if into.data_ptr() not in done:
                done.add(into.data_ptr())
                into.copy_(local_of(leaves[name]))
        return {**leaves, **self.copies}


class Staging:
    """The staged copies of one publisher, by key."""

    def __init__(self) -> None:
        self._staged: dict[str, Staged] = {}

    def of(self, key: str, leaves: Mapping[str, Any], dtype: torch.dtype, *, everything: bool) -> Staged:
        """Room for a state dict; the same as last time if it fits.

        Args:
            key: Under which it will be put.
            leaves: By name.
            dtype: What floating-point tensors become. Others keep theirs.
            everything: Copy also what has that dtype already, so that nothing of the original is published.
        """
        mark = (dtype, everything, tuple((name, _shape(leaf)) for name, leaf in leaves.items()))
        found = self._staged.get(key)
        if found is None or found.mark != mark:
            found = self._staged[key] = _make(mark, leaves, dtype, everything)
        return found

    def forget(self, key: str) -> None:
        """Let go of a key's copies."""
        self._staged.pop(key, None)

    def close(self) -> None:
        """Let go of all copies."""
        self._staged.clear()


def check_transfer_dtype(dtype: object) -> None:
    """Raise TypeError or ValueError for what no floating-point tensor can be converted to on its way."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"transfer_dtype is a torch.dtype, not {dtype!r}")
    if not dtype.is_floating_point:
        raise ValueError(f"transfer_dtype is a floating-point dtype, not {dtype}: other tensors travel as they are")


def _make(mark: tuple[Any, ...], leaves: Mapping[str, Any], dtype: torch.dtype, everything: bool) -> Staged:
    copies: dict[str, torch.Tensor] = {}
    tied: dict[tuple[Any, ...], torch.Tensor] = {}
    for name, leaf in leaves.items():
        if not isinstance(leaf, torch.Tensor):
            continue
        local = local_of(leaf)
        target = dtype if leaf.is_floating_point() else leaf.dtype
        if target == leaf.dtype and not everything:
            continue
        place = (local.data_ptr(), tuple(local.shape), local.stride(), local.dtype)
        copy = tied.get(place)
        if copy is None:
            copy = tied[place] = _room(local, target)
        copies[name] = with_local(leaf, copy) if is_dtensor(leaf) else copy
    return Staged(mark, copies)


def _room(local: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if math.prod(local.shape) == 0:  # an empty shard needs no memory, and there is no empty shared memory
        return torch.empty(local.shape, dtype=dtype, device=local.device)
    return dataplane.empty(tuple(local.shape), dtype, device=str(local.device))


def _shape(leaf: Any) -> tuple[Any, ...]:
    """What decides whether a staged copy fits a leaf."""
    if not isinstance(leaf, torch.Tensor):
        return ()
    local = local_of(leaf)
    # The address tells tied tensors from others; a temporary that comes elsewhere each time just gets new room.
    place = (local.data_ptr(), local.shape, local.stride(), local.dtype, local.device)
    return (*place, leaf.shape, leaf.placements, leaf.device_mesh) if is_dtensor(leaf) else place
