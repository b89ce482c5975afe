"""Which block of which source fills a tensor: matches held boxes with requested boxes.

`match` does it for one tensor, `SourceTensors` for all tensors of a reader: for each it finds the publishers that hold
some of it, and layers with equal layouts are matched only once. Neither touches memory, so a plan can be made, and its
bytes counted, from shapes alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import lcm

from skipper.torchstore.algebra.layout import Box, Ints, Piece, plus
from skipper.torchstore.algebra.manifest import Manifest, TensorItem


@dataclass(frozen=True, slots=True)
class BoxTransfer:
    """Copy a block of ``shape`` from source number ``source`` to the destination.

    Attributes:
        source: Index into the sources given to `match`.
        source_local: Offsets of the block in that source's local tensor.
        target_local: Offsets of the block in the destination's local tensor.
        shape: The shape of the block, in elements.
    """

    source: int
    source_local: Ints
    target_local: Ints
    shape: Ints


@dataclass(frozen=True, slots=True)
class Match:
    """Which block comes from which source, and the boxes without a source."""

    transfers: tuple[BoxTransfer, ...]
    holes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class HeldBoxes:
    """The boxes of one tensor that sources hold.

    Attributes:
        replicas: Each box with its holders: the index of the source, and the offsets in its local tensor.
        choices: The number of preferences after which the answers of `match` repeat: 1 if no box has two holders.
    """

    replicas: tuple[tuple[Box, tuple[tuple[int, Ints], ...]], ...]
    choices: int

    @staticmethod
    def of(sources: Sequence[tuple[Piece, ...]]) -> HeldBoxes:
        """Group the pieces of the sources by their boxes; pieces of the same box are replicas of each other."""
        replicas: dict[Box, list[tuple[int, Ints]]] = {}
        for index, pieces in enumerate(sources):
            for piece in pieces:
                replicas.setdefault(piece.box, []).append((index, piece.local))
        return HeldBoxes(
            tuple((box, tuple(holders)) for box, holders in replicas.items()),
            lcm(*(len(holders) for holders in replicas.values())),
        )


def match(held: HeldBoxes, target: tuple[Piece, ...], *, preference: int = 0) -> Match:
    """Find a source for every element of the destination, each element exactly once.

    Sources that hold the same box are replicas of each other: ``preference`` selects one of them, so that readers (or
    tensors) with different preferences spread over the replicas.

    Args:
        held: The boxes of the sources; they may overlap in any way.
        target: The pieces that the destination needs; they must be disjoint.
        preference: Any number; equal calls give equal answers.

    Returns:
        Disjoint transfers that together cover the target, except for ``holes``.
    """
    transfers: list[BoxTransfer] = []
    holes: list[Box] = []
    for wanted in target:
        missing = [wanted.box]
        for turn, (box, holders) in enumerate(held.replicas):
            if not missing:
                break
            left: list[Box] = []
            for part in missing:
                common = part.intersect(box)
                if common is None:
                    left.append(part)
                    continue
                index, local = holders[(preference + turn) % len(holders)]
                transfers.append(
                    BoxTransfer(
                        index,
                        plus(local, common.relative_to(box.offsets)),
                        plus(wanted.local, common.relative_to(wanted.box.offsets)),
                        common.shape,
                    )
                )
                left.extend(part.subtract(common))
            missing = left
        holes.extend(missing)
    return Match(tuple(transfers), tuple(holes))


class SourceTensors:
    """The tensors of a version as its publishers hold them, for one reader.

    Building it takes time in proportion to what the publishers hold of the reader's tensors only.

    Args:
        manifests: The manifests of all publishers; a transfer refers to them by index.
        names: The stored names of the tensors that the reader requests.
    """

    def __init__(self, manifests: Sequence[Manifest], names: Collection[str]) -> None:
        wanted = names if isinstance(names, frozenset) else frozenset(names)
        self._holders: dict[str, list[tuple[int, TensorItem]]] = {name: [] for name in wanted}
        for index, manifest in enumerate(manifests):
            tensors = manifest.tensors
            for name in tensors.keys() & wanted:  # iterates over the smaller of the two
                self._holders[name].append((index, tensors[name]))
        # Layers repeat: tensors of one layout share their tuples of pieces, so each match is made once for all of them.
        self._held: dict[tuple[int, ...], HeldBoxes] = {}
        self._matches: dict[tuple[int, int, int], Match] = {}

    def holders(self, name: str) -> Sequence[tuple[int, TensorItem]]:
        """The manifests that contain a tensor: their indices, and their items for it."""
        return self._holders[name]

    def find(self, name: str, target: tuple[Piece, ...], preference: int) -> Match:
        """`match` for one tensor of this version.

        Args:
            name: The name of the tensor.
            target: The requested pieces; the caller keeps this object alive.
            preference: Selects among replicas.

        Returns:
            Transfers whose sources are indices into the result of `holders`.
        """
        alike = tuple([id(item.pieces) for _, item in self._holders[name]])
        held = self._held.get(alike)
        if held is None:
            held = self._held[alike] = HeldBoxes.of([item.pieces for _, item in self._holders[name]])
        turn = preference % held.choices
        found = self._matches.get((id(held), id(target), turn))
        if found is None:
            found = self._matches[id(held), id(target), turn] = match(held, target, preference=turn)
        return found
