"""A trainer's weights, for the sources of both releases of vLLM.

vLLM 0.33 has sources of local shards, with metadata that say which rank has which part. Before, ``metadata`` was a
method, and a source gave only whole tensors, by iteration. `ShardSource` gives shards in both releases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

from skipper.torchstore.tensors.local_tensors import is_dtensor

_HAS_MODES = hasattr(WeightSource, "iter_full")


@dataclass(frozen=True)
class WeightMeta:
    """One weight for `WeightOwnership`: owned by all ranks, with an unknown layout."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = None
    placements: None = None


class ShardSource(WeightSource):  # type: ignore[misc]  # vLLM is not there to be typed
    """The parameters of a module on this rank: those of FSDP2 and of tensor parallelism stay sharded.

    Every trainer rank creates one, with the same parameters. Unlike vLLM's ``ModuleSource``, it is the same for vLLM
    0.32 and 0.33, accepts all placements that the store knows, and can rename.

    Args:
        module: The module; its parameters may be DTensors.
        names: Maps a parameter's name to the checkpoint's name, which vLLM's ``load_weights`` expects; other parameters
            keep their names.
    """

    def __init__(self, module: torch.nn.Module, names: dict[str, str] | None = None) -> None:
        self._module = module
        self._names = names or {}

    def weights(self) -> dict[str, torch.Tensor]:
        """All parameters, by the checkpoint's names; no memory is copied."""
        return {self._names.get(name, name): weight.detach() for name, weight in self._module.named_parameters()}

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors, gathered one by one: a collective."""
        for name, weight in self.weights().items():
            yield name, weight.full_tensor() if is_dtensor(weight) else weight

    __iter__ = iter_full

    if _HAS_MODES:

        @cached_property
        def metadata(self) -> list[ParamMeta]:
            """The name, dtype and whole shape of each weight."""
            return self._described()

    else:

        def metadata(self) -> list[ParamMeta]:
            """The name, dtype and whole shape of each weight."""
            return self._described()

    def _described(self) -> list[ParamMeta]:
        return [ParamMeta(name, weight.dtype, tuple(weight.shape)) for name, weight in self.weights().items()]


def described(source: Any) -> list[Any]:
    """The metadata of a source: the ``name``, ``dtype``, ``shape``, ``owners`` and ``placements`` of each weight.

    Raises:
        ValueError: Trainer ranks hold different weights, and this release of vLLM does not say who has which.
    """
    if not callable(source.metadata):
        return list(source.metadata)
    if source.held_names() is not None:
        raise ValueError(
            f"{type(source).__name__} gives some of the weights on each rank, and vLLM before 0.33 does not say which "
            "ranks have the others: use vLLM 0.33, or give all of them on every rank (ShardSource)"
        )
    return [WeightMeta(meta.name, meta.dtype, tuple(meta.shape)) for meta in source.metadata()]


def gives_whole(source: Any) -> bool:
    """Whether a source gives whole tensors."""
    return bool(source.implements_iter_full()) if _HAS_MODES else True


def gives_shards(source: Any) -> bool:
    """Whether a source gives each rank's shards by ``iter_local``, described by its metadata."""
    return _HAS_MODES and bool(source.implements_iter_local())


def whole_tensors(source: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The whole tensors of a source, from the first one on."""
    return iter(source.iter_full() if hasattr(source, "iter_full") else source)
