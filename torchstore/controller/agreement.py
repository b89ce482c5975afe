"""The combined statements of a version's shares about its tensors, to compare a new share with all at once.

Comparing every share with every other one takes quadratic time: half an hour for 256 ranks with 100,000 tensors each.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from skipper.torchstore.algebra.layout import Ints
from skipper.torchstore.algebra.manifest import Manifest


class Agreement:
    """The dtype and the shape of every tensor in the shares."""

    __slots__ = ("_ids", "_kind", "_said")

    def __init__(self) -> None:
        self._kind = ""
        self._ids: set[str] = set()
        self._said: dict[str, tuple[str, Ints]] = {}

    def take(self, manifest: Manifest) -> bool:
        """Add the statements of a share.

        Returns:
            Whether all agree. A share that disagrees is added in part, so that later ones may disagree, too: the ranks
            that differ are found by comparing two shares at a time.
        """
        if manifest.id in self._ids:
            return True
        if manifest.kind != (self._kind or manifest.kind):
            return False
        self._kind = manifest.kind
        for name, item in manifest.tensors.items():
            said = (item.dtype, item.global_shape)
            if self._said.setdefault(name, said) != said:
                return False
        self._ids.add(manifest.id)
        return True

    def is_about(self, manifests: Iterable[Manifest]) -> bool:
        """Whether everything that was added is still among the shares."""
        return self._ids.issubset({manifest.id for manifest in manifests})
