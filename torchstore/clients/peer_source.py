"""A reader's copies, offered to other readers: the same memory, seal and epochs as in direct mode."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from skipper.torchstore.clients.destination import Destination
from skipper.torchstore.clients.direct_put import DirectMemory
from skipper.torchstore.protocol.messages import Share
from skipper.torchstore.support.process import this_process
from skipper.torchstore.tensors.local_tensors import LocalTensor
from skipper.torchstore.tensors.packing import Packed, pack

_REFRESH = 64  # offers after which records are sent whole again: the controller remembers a bounded number


@dataclass(frozen=True, slots=True)
class _Copy:
    packed: Packed
    read_group: str


class PeerSource:
    """The copies that one process offers to other readers, by key."""

    def __init__(self) -> None:
        self._memory = DirectMemory()
        self._copies: dict[str, _Copy] = {}
        self._offered: set[str] = set()
        self._told: dict[str, int] = {}  # by binding id: in how many offers

    def read_group(self, key: str, destination: Destination) -> str:
        """Identifies the parts of a destination: readers with equal identifiers can serve each other.

        Raises:
            MismatchError: A tensor that nothing can be read into.
            ValueError: There is no tensor to be read into.
        """
        copy = self._copy(key, destination)
        if not copy.packed.tensors:
            raise ValueError(f"serve=True offers the tensors that were read, and the destination has none for {key!r}")
        return copy.read_group

    def withdraw(self, key: str) -> bool:
        """Break the seal before the copy is overwritten, so that its readers detect it.

        Returns:
            Whether there was one.
        """
        if key not in self._offered:
            return False
        self._memory.withdraw(key)
        self._offered.remove(key)
        return True

    def offer(self, key: str, destination: Destination) -> Share:
        """Seal the destination as it is now.

        Raises:
            dataplane.errors.RegistrationError: Some memory cannot be registered.
        """
        packed = self._copy(key, destination).packed
        if self._memory.find(key, packed.mark) is None:
            self._memory.forget(key)
        binding, generation = self._memory.publish(key, packed)
        self._offered.add(key)
        times = self._told[binding.id] = self._told.get(binding.id, -1) + 1
        known = times % _REFRESH != 0
        return Share(
            packed.manifest.id if known else packed.manifest,
            binding.id if known else binding,
            generation,
            this_process(),
        )

    def forget(self, key: str) -> None:
        """Stop offering this copy: only the reader uses its memory again."""
        self._memory.forget(key)
        self._copies.pop(key, None)
        self._offered.discard(key)

    def close(self) -> None:
        """Offer nothing from now on."""
        self._memory.close()
        self._copies.clear()
        self._offered.clear()
        self._told.clear()

    def _copy(self, key: str, destination: Destination) -> _Copy:
        found = self._copies.get(key)
        if found is None or found.packed.mark != destination.mark:
            packed = pack(key, "state_dict", "direct", destination.tensors(), mark=destination.mark)
            found = self._copies[key] = _Copy(packed, _group_name(destination, packed.tensors))
        return found


def _group_name(destination: Destination, tensors: Mapping[str, LocalTensor]) -> str:
    """A digest of the future content of the tensors: of their boxes, and of the parts that `names` gives for them."""
    what: list[Any] = []
    answers = destination.answers()
    for name, leaf in destination.leaves.items():
        answer = answers.get(name)
        if name in tensors:
            local = tensors[name]
            boxes = [(piece.box.offsets, piece.box.shape) for piece in local.pieces]
            what.append((name, str(local.tensor.dtype), local.global_shape, boxes))
            if answer is not None:  # each part of a stack is cut by the placements
                what.append((answer, local.layout, local.coordinate))
        elif not isinstance(leaf, torch.Tensor):
            what.append((name, answer))
    return hashlib.blake2b(repr(what).encode(), digest_size=16).hexdigest()
