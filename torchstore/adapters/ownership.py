"""Which trainer rank puts which weights, as vLLM's ``ParamMeta`` says who owns them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any


class WeightOwnership:
    """Who owns the weights of a trainer.

    Args:
        metadata: For each weight ``name``, ``shape``, ``dtype``, ``owners`` (ranks; None: all) and ``placements``.
        ranks: How many trainer ranks there are.

    Attributes:
        is_staged: Whether some weights belong to some ranks only, as in a pipeline.
        is_shared: Whether every rank has a part of some weight to put that no other rank has.

    Raises:
        ValueError: A weight has no owner, or one that is no rank.
    """

    def __init__(self, metadata: Sequence[Any], ranks: int) -> None:
        for meta in metadata:
            if meta.owners is not None and (not meta.owners or not all(0 <= owner < ranks for owner in meta.owners)):
                raise ValueError(f"{meta.name} is owned by ranks {meta.owners} of {ranks}")
        self._metadata = metadata
        self.is_staged = any(meta.owners is not None and len(meta.owners) != ranks for meta in metadata)
        self.is_shared = ranks == 1 or self.is_staged or any(meta.placements is not None for meta in metadata)

    def pieces(self, nbytes: int) -> dict[int, list[list[Any]]]:
        """What each rank puts of the whole weights, one piece after the other: those of which it is the first owner.

        Args:
            nbytes: Bound on the bytes of a piece that is not a single weight.

        Returns:
            By rank, for those that put anything and for rank 0, at least one piece each.
        """
        pieces: dict[int, list[list[Any]]] = {0: [[]]}
        filled: dict[int, int] = {}
        for meta in self._metadata:
            rank = min(meta.owners) if meta.owners else 0
            size = prod(meta.shape) * meta.dtype.itemsize
            cut = pieces.setdefault(rank, [[]])
            if cut[-1] and filled[rank] + size > nbytes:
                cut.append([])
            filled[rank] = (filled[rank] if cut[-1] else 0) + size
            cut[-1].append(meta)
        return dict(sorted(pieces.items()))
