"""The plans of readers from shapes alone: each for itself, by the code with which the store compiles a read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from skipper.benchmarks.errors import BenchmarkError
from skipper.benchmarks.weight_sync.modelled.placement import HeldPart
from skipper.torchstore.algebra.layout import Ints
from skipper.torchstore.algebra.manifest import Manifest
from skipper.torchstore.algebra.matching import SourceTensors

__all__ = ["Moved", "Planner", "ReaderPlan"]


@dataclass(slots=True)
class Moved:
    """What one reader reads from one publisher.

    Attributes:
        runs: Contiguous stretches: each is an operation of the network card.
    """

    nbytes: int = 0
    blocks: int = 0
    runs: int = 0


@dataclass(frozen=True, slots=True)
class ReaderPlan:
    """The plan of one reader.

    Attributes:
        moved: What it moves, by rank of the publisher.
        needed: Bytes of the reader's tensors.
        tensors: How many it fills.
    """

    moved: Mapping[int, Moved]
    needed: int
    tensors: int

    @property
    def nbytes(self) -> int:
        """Bytes that it moves."""
        return sum(moved.nbytes for moved in self.moved.values())

    @property
    def runs(self) -> int:
        """Contiguous stretches."""
        return sum(moved.runs for moved in self.moved.values())


class Planner:
    """Plans reads of the tensors that a rank of an engine needs; the same rank of all engines needs the same.

    Args:
        manifests: Manifests of all publishers.
        held: What the rank needs.
    """

    def __init__(self, manifests: Sequence[Manifest], held: Sequence[HeldPart]) -> None:
        self._held = held
        self._blocks: dict[tuple[int, Ints, int], list[tuple[int, int, int]]] = {}  # of a match: layers repeat
        self._tensors = SourceTensors(manifests, [part.tensor.name for part in held])

    def plan(self, reader: int) -> ReaderPlan:
        """The plan of one reader, whose number chooses among replicas as `compile_read` does.

        Raises:
            BenchmarkError: Nobody holds some of what it needs.
        """
        moved: dict[int, Moved] = {}
        for position, part in enumerate(self._held):
            name, itemsize = part.tensor.name, part.tensor.itemsize
            found = self._tensors.find(name, part.pieces, reader + position)
            if found.holes:
                raise BenchmarkError(f"nobody holds {found.holes[0]} of {name}")
            holders = self._tensors.holders(name)
            alike = (id(found), part.shape, itemsize)
            blocks = self._blocks.get(alike)
            if blocks is None:
                blocks = self._blocks[alike] = [
                    (
                        transfer.source,
                        prod(transfer.shape) * itemsize,
                        _runs(transfer.shape, holders[transfer.source][1].strides, part.shape, itemsize),
                    )
                    for transfer in found.transfers
                ]
            for source, nbytes, runs in blocks:
                index = holders[source][0]
                entry = moved.get(index) or moved.setdefault(index, Moved())
                entry.nbytes += nbytes
                entry.blocks += 1
                entry.runs += runs
        return ReaderPlan(moved, sum(part.nbytes for part in self._held), len(self._held))


def _runs(block: Ints, strides: Ints, target: Ints, itemsize: int) -> int:
    """Contiguous stretches of a block that goes from memory with these strides into a contiguous tensor."""
    run = step = 1
    for size, stride, whole in zip(reversed(block), reversed(strides), reversed(target), strict=True):
        if size > 1 and (run != step or stride != step * itemsize):
            break
        run *= size
        step *= whole
    return prod(block) // run
