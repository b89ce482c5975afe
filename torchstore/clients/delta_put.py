"""The publisher's side of deltas: what it has put last under each key, which the next version may be based on."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

import torch

from skipper.dataplane.errors import DataplaneError
from skipper.torchstore.algebra.manifest import Binding
from skipper.torchstore.protocol.messages import Change, Publication
from skipper.torchstore.tensors.delta import changed_cells, pack_flags
from skipper.torchstore.tensors.packing import Packed


@dataclass(frozen=True, slots=True)
class _Base:
    """A publication of this process."""

    stamp: str
    manifest: str
    binding: Binding | None


class Bases:
    """What one publisher has put last under each key, where a delta may be based on it."""

    def __init__(self) -> None:
        self._last: dict[str, _Base] = {}

    def compare(self, key: str, packed: Packed, timeout: float) -> tuple[Change | None, int]:
        """What tensors change of the last publication. To be called before the next one is written.

        Returns:
            The change, or None where there is nothing to compare with (any more), and the bytes of unchanged cells.
        """
        last = self._last.get(key)
        if last is None or last.manifest != packed.manifest.id:
            return None, 0
        if last.binding is None:  # this process holds nothing of the value
            return Change(last.stamp, pack_flags(torch.zeros(0, dtype=torch.bool, device="cpu"))), 0
        try:
            changed, same = changed_cells(packed.manifest.tensors, packed.tensors, last.binding.buffers[0], timeout)
        except DataplaneError:  # freed since, or its volume is gone: the version is put whole, or fails by itself
            return None, 0
        return Change(last.stamp, pack_flags(changed)), same

    @staticmethod
    def stamp() -> str:
        """A name for a publication, unlike any other."""
        return uuid.uuid4().hex

    def published(self, key: str, packed: Packed, sent: Publication) -> None:
        """The next put of the key may be based on this one."""
        binding = sent.binding if isinstance(sent.binding, Binding) else None
        self._last[key] = _Base(sent.stamp, packed.manifest.id, binding)

    def forget(self, key: str) -> None:
        """The next put of the key cannot be based on anything."""
        self._last.pop(key, None)
