"""What the shares of a version say of its tensors, put together, so that a new share is compared with all at once.

Comparing every share with every other one takes time with the square of their number: of 256 ranks with 100,000 tensors
each, half an hour. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from skipper.torchstore.algebra.layout import Ints
from skipper.torchstore.algebra.manifest import Manifest


class Agreement:
    """The dtype and the shape of every tensor that some share has named."""

    __slots__ = ("_ids", "_kind", "_said")

    def __init__(self) -> None:
        self._kind = ""
        self._ids: set[str] = set()
        self._said: dict[str, tuple[str, Ints]] = {}

    def take(self, manifest: Manifest) -> bool:
        """Add what a share says.

        Returns:
            Whether all agree. What disagrees is added in part, so that later ones may be found to disagree, too: who
            they are is for those to find out who compare two of them.
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
        """Whether all that was added is still among the shares."""
        return self._ids.issubset({manifest.id for manifest in manifests})
