"""Checksums of what was published, with which a reader verifies that it got the same bytes.

The publisher computes the checksum of every cell (`torchstore.tensors.cells`) before it copies or offers its tensors.
The checksums are stored with the data: at the end of the arena, or in a separate buffer in direct mode. A reader
fetches them with the data and computes the checksums of what has arrived. Cells that its box cuts are also fetched
whole into scratch memory, verified there, and compared with the part that has arrived. So every byte that is read is
verified, for all layouts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod

import torch

from skipper.dataplane import RDMAAction, RDMABuffer, RemoteLayout
from skipper.torchstore.algebra.layout import Box, Ints, Piece, minus, plus
from skipper.torchstore.algebra.manifest import Binding, Digests, Manifest, TensorItem
from skipper.torchstore.algebra.matching import BoxTransfer
from skipper.torchstore.errors import ChecksumError
from skipper.torchstore.tensors.cells import (
    cell_shape,
    cell_sums,
    cells,
    cells_differ,
    grid_shape,
    grid_slice,
    region,
    whole_cells,
)
from skipper.torchstore.tensors.local_tensors import LocalTensor

_SUM_BYTES = 8


def count_sums(items: Mapping[str, TensorItem]) -> int:
    """The number of checksums of a publisher's tensors."""
    return sum(
        prod(grid_shape(piece.box, cell_shape(item.global_shape))) for item in items.values() for piece in item.pieces
    )


@torch.no_grad()
def fill_sums(table: torch.Tensor, items: Mapping[str, TensorItem], tensors: Mapping[str, LocalTensor]) -> None:
    """Compute the checksums of a publisher's tensors as they are now.

    Args:
        table: int64, `count_sums` elements; by item, piece and cell.
        items: The items of the manifest.
        tensors: The memory of each item.
    """
    end = 0
    for name, item in items.items():
        cell = cell_shape(item.global_shape)
        for piece in item.pieces:
            block = region(tensors[name].tensor, piece.local, piece.box.shape)
            sums = cell_sums(block, piece.box.offsets, cell).reshape(-1)
            table[end : end + sums.numel()].copy_(sums)
            end += sums.numel()


@torch.no_grad()
def digests_of(tensors: Mapping[str, LocalTensor]) -> Digests:
    """A digest of every box that this process holds: equal bytes, equal digests."""
    found: dict[tuple[str, Ints, Ints], bytes] = {}
    for name, local in tensors.items():
        cell = cell_shape(local.global_shape)
        for piece in local.pieces:
            block = region(local.tensor, piece.local, piece.box.shape)
            sums = cell_sums(block, piece.box.offsets, cell).cpu().contiguous()
            digest = hashlib.blake2b(sums.numpy().tobytes(), digest_size=16)
            found[name, piece.box.offsets, piece.box.shape] = digest.digest()
    return found


@dataclass(frozen=True, slots=True)
class _Claim:
    """A block of whole cells, with the checksums that its publisher has computed."""

    name: str
    block: torch.Tensor
    box: Box
    cell: Ints
    sums: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Twin:
    """A block that was read twice: to its destination, and with the rest of its cells into scratch memory."""

    name: str
    arrived: torch.Tensor
    proved: torch.Tensor
    box: Box
    cell: Ints


class ArrivalProof:
    """The verification by a reader after the bytes of one plan have arrived; built by `ProofBuilder`.

    Attributes:
        action: Fetches the checksums and the cells that the destination cuts. Run it with the plan.
        nbytes: The bytes that the action moves.
        of_source: These bytes by source.
    """

    def __init__(
        self, action: RDMAAction, claims: Sequence[_Claim], twins: Sequence[_Twin], of_source: Mapping[int, int]
    ) -> None:
        self.action = action
        self.of_source = of_source
        self.nbytes = sum(of_source.values())
        self._claims = claims
        self._twins = twins

    @torch.no_grad()
    def check(self, version: int) -> None:
        """Compute the checksums of what has arrived, and compare.

        Raises:
            ChecksumError: The bytes that arrived differ from the published ones; the message names tensor and cell.
        """
        for claim in self._claims:
            sums = cell_sums(claim.block, claim.box.offsets, claim.cell).cpu()
            if not torch.equal(sums, claim.sums):
                _refuse(claim.name, version, claim.box, claim.cell, sums != claim.sums)
        for twin in self._twins:
            differing = cells_differ(twin.arrived, twin.proved, twin.box.offsets, twin.cell)
            if bool(differing.any()):
                _refuse(twin.name, version, twin.box, twin.cell, differing)


def _refuse(name: str, version: int, box: Box, cell: Ints, wrong: torch.Tensor) -> None:
    first = int(wrong.reshape(-1).nonzero()[0])
    found = next(islice(cells(box, cell), first, None)) if wrong.ndim else box
    raise ChecksumError(name, version, found.offsets, found.shape, int(wrong.sum()))


class ProofBuilder:
    """Collects what must be verified while a plan is compiled.

    ``sources`` has the manifest and the memory of each source, in the plan's order; without checksums, no proof.
    """

    def __init__(self, sources: Sequence[tuple[Manifest, Binding | None]]) -> None:
        self._sources = sources
        self._action = RDMAAction()
        self._claims: list[_Claim] = []
        self._twins: list[_Twin] = []
        self._of_source: dict[int, int] = {}
        self._tables: dict[int, torch.Tensor] = {}
        self._starts: dict[int, dict[tuple[str, int], int]] = {}

    def add(self, index: int, stored: str, transfer: BoxTransfer, target: torch.Tensor, *, name: str) -> None:
        """Add the block of one transfer."""
        manifest, binding = self._sources[index]
        if manifest.sums is None or binding is None:
            return
        item = manifest.tensors[stored]
        cell = cell_shape(item.global_shape)
        number, piece = item.piece_at(transfer.source_local)
        start = plus(piece.box.offsets, minus(transfer.source_local, piece.local))
        part = Box(start, transfer.shape)
        sums = self._sums(index, binding.buffers, stored, number, piece, cell)
        inner, outer = whole_cells(part, piece.box, cell)
        if inner is not None:
            block = region(target, plus(transfer.target_local, inner.relative_to(start)), inner.shape)
            self._claims.append(_Claim(name, block, inner, cell, sums[grid_slice(inner, piece.box, cell)]))
        cut = () if outer == inner else (outer,) if inner is None else outer.subtract(inner)
        for slab in cut:
            scratch = torch.empty(slab.shape, dtype=target.dtype, device=target.device)
            self._action.read_remote(
                scratch,
                binding.buffers[item.buffer],
                layout=item.block_at(plus(piece.local, slab.relative_to(piece.box.offsets)), slab.shape),
            )
            self._of_source[index] += scratch.nbytes
            self._claims.append(_Claim(name, scratch, slab, cell, sums[grid_slice(slab, piece.box, cell)]))
            both = slab.intersect(part)
            if both is not None:
                arrived = region(target, plus(transfer.target_local, both.relative_to(start)), both.shape)
                proved = region(scratch, both.relative_to(slab.offsets), both.shape)
                self._twins.append(_Twin(name, arrived, proved, both, cell))

    def build(self) -> ArrivalProof | None:
        """The proof; None if no source has checksums."""
        return ArrivalProof(self._action, self._claims, self._twins, self._of_source) if self._claims else None

    def _sums(
        self, index: int, buffers: Sequence[RDMABuffer], stored: str, number: int, piece: Piece, cell: Ints
    ) -> torch.Tensor:
        """The checksums of one piece of a source, in the shape of the piece's grid."""
        manifest, _ = self._sources[index]
        if index not in self._tables and manifest.sums is not None:
            buffer, offset = manifest.sums
            starts = self._starts[index] = {}
            end = 0
            for name, item in manifest.tensors.items():
                for position, other in enumerate(item.pieces):
                    starts[name, position] = end
                    end += prod(grid_shape(other.box, cell_shape(item.global_shape)))
            table = self._tables[index] = torch.empty(end, dtype=torch.int64, device="cpu")
            self._action.read_remote(
                table, buffers[buffer], layout=RemoteLayout(offset, (end,), (_SUM_BYTES,), _SUM_BYTES)
            )
            self._of_source[index] = table.nbytes
        shape = grid_shape(piece.box, cell)
        begin = self._starts[index][stored, number]
        return self._tables[index][begin : begin + prod(shape)].view(shape)
