"""Reading what has changed: a plan cut down to the cells that differ from the version that a destination holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from skipper.dataplane import RDMAAction
from skipper.torchstore.algebra.layout import Box, Ints, minus, plus
from skipper.torchstore.algebra.manifest import TensorItem
from skipper.torchstore.clients.catalog import Opened
from skipper.torchstore.tensors.cells import cell_shape, grid_shape, grid_slice, whole_cells
from skipper.torchstore.tensors.delta import Flags, unpack_flags
from skipper.torchstore.tensors.landing import Landing
from skipper.torchstore.tensors.plan import Plan, Source

_WORTH = 0.5  # of the bytes: when more have changed, reading everything by the existing plan takes less time


@dataclass(frozen=True, slots=True)
class DeltaRead:
    """The reads that bring a destination from one version to the next.

    Attributes:
        nbytes: What they move.
        of_source: For each source, the bytes that are read from it and in how many blocks.
        landings: Those of the plan whose values have to be computed again.
    """

    action: RDMAAction
    nbytes: int
    of_source: tuple[tuple[int, int], ...]
    landings: Mapping[str, Landing]

    @property
    def segments(self) -> int:
        """Contiguous runs after coalescing."""
        return self.action.segments if self.nbytes else 0


@dataclass(frozen=True, slots=True)
class DestinationContents:
    """The content of a destination that was read with ``delta=True``.

    Attributes:
        mark: The fingerprint of the destination.
        manifests: Ids of what was read, in the order of the sources; a stamp for each.
        plan: How it was filled. It keeps the destination's memory, so that no other tensors can be there, and the
            received elements of tensors that were dequantized.
    """

    mark: tuple[Any, ...]
    manifests: tuple[str, ...]
    stamps: tuple[str, ...]
    plan: Plan

    @staticmethod
    def of(mark: tuple[Any, ...], opened: Opened, plan: Plan) -> DestinationContents:
        """The content of a destination after it has been filled with a version."""
        stamps = tuple(share.stamp for share in opened.grant.shares)
        return DestinationContents(mark, tuple(source.manifest.id for source in opened.sources), stamps, plan)

    def changes(self, mark: tuple[Any, ...], plan: Plan, opened: Opened) -> list[bytes | None] | None:
        """The changes since the last read, for each source (None: no change).

        Returns:
            None if a source cannot tell, or if this is another destination: read all of it.
        """
        here = self.plan.landings
        if self.mark != mark or any(here.get(label) is not landing for label, landing in plan.landings.items()):
            return None
        if self.manifests != tuple(source.manifest.id for source in opened.sources):
            return None
        changes: list[bytes | None] = []
        for stamp, share in zip(self.stamps, opened.grant.shares, strict=True):
            if not stamp or (share.stamp != stamp and (share.change is None or share.change.base != stamp)):
                return None
            changes.append(share.change.cells if share.change is not None and share.stamp != stamp else None)
        return changes


def compile_delta(plan: Plan, sources: Sequence[Source], changes: Sequence[bytes | None]) -> DeltaRead | None:
    """The reads of a plan, cut down to the cells that have changed.

    Returns:
        None if so much has changed that the plan itself is faster.
    """
    action = RDMAAction()
    moved, blocks = [0] * len(sources), [0] * len(sources)
    written: set[int] = set()
    grids = [
        {} if packed is None else _grids(source.manifest.tensors, packed)
        for source, packed in zip(sources, changes, strict=True)
    ]
    for index, stored, transfer, target in plan.moves:
        binding, item = sources[index].binding, sources[index].manifest.tensors[stored]
        if binding is None or stored not in grids[index]:
            continue
        number, piece = item.piece_at(transfer.source_local)
        cell = cell_shape(item.global_shape)
        start = plus(piece.box.offsets, minus(transfer.source_local, piece.local))
        part = Box(start, transfer.shape)
        _, touched = whole_cells(part, piece.box, cell)
        for block in _blocks(grids[index][stored][number][grid_slice(touched, piece.box, cell)], touched, cell):
            both = block.intersect(part)
            if both is None:
                continue
            inside = both.relative_to(start)
            action.read_remote(
                target,
                binding.buffers[item.buffer],
                layout=item.block_at(plus(transfer.source_local, inside), both.shape),
                at=plus(transfer.target_local, inside),
            )
            moved[index] += both.numel * item.itemsize
            blocks[index] += 1
            written.add(id(target))
    if sum(moved) > plan.nbytes * _WORTH:
        return None
    # With checksums everything that has arrived is verified again, so values that were changed are corrected.
    landings = {
        label: landing
        for label, landing in plan.landings.items()
        if plan.proof is not None or not written.isdisjoint(landing.memory())
    }
    return DeltaRead(action, sum(moved), tuple(zip(moved, blocks, strict=True)), landings)


def _grids(items: Mapping[str, TensorItem], packed: bytes) -> dict[str, list[Flags]]:
    """The flags of those items of a source that have changed, for each piece in the shape of its grid."""
    shapes = {
        name: [grid_shape(piece.box, cell_shape(item.global_shape)) for piece in item.pieces]
        for name, item in items.items()
    }
    flags = unpack_flags(packed, sum(prod(shape) for each in shapes.values() for shape in each))
    changed: dict[str, list[Flags]] = {}
    end = 0
    for name, each in shapes.items():
        start, grids = end, []
        for shape in each:
            grids.append(flags[end : end + prod(shape)].reshape(shape))
            end += prod(shape)
        if flags[start:end].any():
            changed[name] = grids
    return changed


def _blocks(flags: Flags, touched: Box, cell: Ints) -> Iterator[Box]:
    """The flagged cells of a block as few boxes: runs along the last dim, equal runs of following rows joined."""
    if not flags.any():
        return
    if flags.all():
        yield touched
        return
    lines = flags.reshape(-1, flags.shape[-1])
    joined = flags.shape[-2] if flags.ndim > 1 else 1  # rows that follow each other in the tensor too
    busy = np.asarray(lines.any(1))
    for first in range(0, len(lines), joined):
        begun: dict[tuple[int, int], int] = {}
        for row in range(first, first + joined + 1):
            runs = _runs(lines[row]) if row < first + joined and busy[row] else []
            for run in [run for run in begun if run not in runs]:
                yield _box(touched, cell, flags.shape, first, (begun.pop(run) - first, row - first), run)
            for run in runs:
                begun.setdefault(run, row)


def _runs(line: Flags) -> list[tuple[int, int]]:
    """The stretches of a row that are true, as first and one after the last."""
    edges = np.flatnonzero(np.diff(line, prepend=False, append=False)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _box(
    touched: Box, cell: Ints, shape: Sequence[int], first: int, rows: tuple[int, int], run: tuple[int, int]
) -> Box:
    """The box of some cells of a grid, within the block that the grid is of.

    Args:
        touched: The block.
        cell: The shape of its cells.
        shape: The shape of the grid.
        first: The row of the grid, all dims but the last counted as one, that the rows are counted from.
        rows: Along the dim before the last, first and one after the last.
        run: The same along the last dim.
    """
    ranges = [run]
    if len(shape) > 1:
        ranges.insert(0, rows)
        rest = first // shape[-2]
        for size in reversed(shape[:-2]):
            rest, at = divmod(rest, size)
            ranges.insert(0, (at, at + 1))
    offsets, sizes = [], []
    for (begin, end), start, size, step in zip(ranges, touched.offsets, touched.shape, cell, strict=True):
        low = max((start // step + begin) * step, start)
        offsets.append(low)
        sizes.append(min((start // step + end) * step, start + size) - low)
    return Box(tuple(offsets), tuple(sizes))
