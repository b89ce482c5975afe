"""From boxes to bytes: the plan of a read, compiled once and replayed.

`compile_read` matches what the sources hold with what the destination needs, proves that nothing is missing before the
first byte moves, and stores the result as one `dataplane.RDMAAction`. Running the plan again costs one submit, for any
number of tensors.

A plan depends on the layouts of both sides, the dtypes and the addresses. Bindings have an id per memory and
`tensors.fingerprint` holds the rest: `PlanCache` keeps plans under (binding ids, fingerprint).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from threading import Lock
from typing import Any

import torch

from skipper.control.model.progress import is_followed, track_progress
from skipper.control.runtime import tracing
from skipper.dataplane import RDMAAction, RDMABuffer, RemoteLayout
from skipper.dataplane.errors import TransferTimeoutError
from skipper.dataplane.uncollected import uncollected
from skipper.torchstore.algebra.layout import Ints
from skipper.torchstore.algebra.manifest import Binding, Manifest, TensorItem
from skipper.torchstore.algebra.matching import BoxTransfer, SourceTensors
from skipper.torchstore.errors import CoverageError, DTypeMismatchError, LayoutMismatchError
from skipper.torchstore.support.lru_cache import LRUCache
from skipper.torchstore.tensors.checksums import ArrivalProof, ProofBuilder
from skipper.torchstore.tensors.landing import Landing
from skipper.torchstore.tensors.local_tensors import LocalTensor, check_destination, same_elements

_AT_ONCE_BYTES = 1 << 20  # about 100 us of copying: about the cost of switching to another task and back
_AT_ONCE_S = 0.002
_PIECE_BYTES = 256 << 20  # tens of milliseconds at the speed of memory; in comparison, submitting it costs nothing

REPORTED_NBYTES = 64 << 20
"""Transfers of this size or more report their progress, if somebody follows it."""


@dataclass(frozen=True, slots=True)
class Source:
    """One publisher's manifest with the memory behind it."""

    manifest: Manifest
    binding: Binding | None

    @property
    def id(self) -> str:
        """An id that changes with the layout and with the memory."""
        return f"{self.manifest.id}@{self.binding.id if self.binding else ''}"


class Plan:
    """A compiled read, which can run any number of times, and its figures.

    Attributes:
        nbytes: Bytes that one run moves.
        needed: Bytes of the destination.
        tensors: The number of tensors that are filled.
        of_source: For each source, the bytes that are read from it, and in how many blocks.
        compile_s: The time to build it.
        proof: Verifies what has arrived; None if the sources have no checksums.
        landings: The landings that become values after the transfer, by the label of their target.
        filled: The names of the given tensors that it writes to, as in the reader's state dict.
        moves: Each block with its source (by index), its name there, and its destination tensor.
    """

    def __init__(
        self,
        action: RDMAAction,
        seals: Seals,
        *,
        needed: int,
        tensors: int,
        of_source: tuple[tuple[int, int], ...],
        compile_s: float,
        proof: ArrivalProof | None = None,
        moves: Sequence[tuple[int, str, BoxTransfer, torch.Tensor]] = (),
    ) -> None:
        self.action = action
        self.seals = seals
        self.proof = proof
        self.moves = moves
        self.landings: Mapping[str, Landing] = {}
        self.filled: tuple[str, ...] = ()
        self.nbytes = action.nbytes
        self.needed = needed
        self.tensors = tensors
        self.of_source = of_source
        self.compile_s = compile_s

    @property
    def transfers(self) -> int:
        """The number of blocks, before neighbours are joined."""
        return sum(blocks for _, blocks in self.of_source)

    @property
    def segments(self) -> int:
        """The number of contiguous runs after coalescing; 0 if nothing has to be moved."""
        return self.action.segments if self.nbytes else 0


class Seals:
    """The words with the generation of each publisher's memory (direct mode), read one-sidedly."""

    def __init__(self, seals: Sequence[RDMABuffer | None]) -> None:
        present = [(index, seal) for index, seal in enumerate(seals) if seal is not None]
        self._which = [index for index, _ in present]
        self._words = torch.zeros(len(present), dtype=torch.int64, device="cpu")
        self._action = RDMAAction()
        for position, (_, seal) in enumerate(present):
            self._action.read_remote(self._words[position : position + 1], seal)

    async def read(self, timeout: float) -> dict[int, int]:
        """The generation that each source (by index) has published now; 0 for none."""
        if not self._which:
            return {}
        await execute(self._action, self._words.nbytes, timeout)
        return dict(zip(self._which, self._words.tolist(), strict=True))


@uncollected()
def compile_read(
    key: str,
    sources: Sequence[Source],
    targets: Mapping[str, LocalTensor],
    *,
    reader: int = 0,
    stored: Mapping[str, str] | None = None,
) -> Plan:
    """Compute which bytes of which handle go to which bytes of the destination.

    Every byte of the destination is read once: if several sources hold the same box, ``reader`` and the position of the
    tensor select one of them, so that readers and tensors spread over the replicas.

    ``stored`` maps targets to their names in the sources, if those differ.

    Raises:
        CoverageError: Some box of a target is in no source. The message names key and box; nothing has been moved.
        DTypeMismatchError: Source and target of a name have different dtypes.
        LayoutMismatchError: They are parts of tensors of different shapes.
    """
    begin = time.perf_counter()
    action = RDMAAction()
    needed = 0
    moved, blocks = [0] * len(sources), [0] * len(sources)
    moves: list[tuple[int, str, BoxTransfer, torch.Tensor]] = []
    proof = ProofBuilder([(source.manifest, source.binding) for source in sources])
    names = [stored.get(label, label) for label in targets] if stored else list(targets)
    tensors = SourceTensors([source.manifest for source in sources], names)
    filled: dict[int, _Filling] = {}  # by address: tensors that are tied on both sides are read once
    for position, (name, (label, target)) in enumerate(zip(names, targets.items(), strict=True)):
        full_name = key if not label else f"{key}/{label}" if name == label else f"{key}/{name} (for {label})"
        check_destination(target.tensor, full_name)
        holders = tensors.holders(name)
        if holders:  # the sources of one version agree on dtype and shape
            check_same(full_name, holders[0][1].dtype, holders[0][1].global_shape, target)
        found = tensors.find(name, target.pieces, reader + position)
        if found.holes:
            raise CoverageError(full_name, tuple((hole.offsets, hole.shape) for hole in found.holes))
        filling = (target, holders, found.transfers)
        if (before := filled.setdefault(target.tensor.data_ptr(), filling)) is not filling and _alike(before, filling):
            continue
        for transfer in found.transfers:
            index, item = holders[transfer.source]
            binding = sources[index].binding
            if binding is None:  # pieces without memory: the publisher has made a mistake
                raise CoverageError(full_name, ((transfer.target_local, transfer.shape),))
            action.read_remote(
                target.tensor,
                binding.buffers[item.buffer],
                layout=item.block_at(transfer.source_local, transfer.shape),
                at=transfer.target_local,
            )
            moved[index] += prod(transfer.shape) * item.itemsize
            blocks[index] += 1
            moves.append((index, name, transfer, target.tensor))
            proof.add(index, name, transfer, target.tensor, name=full_name)
        needed += sum(piece.box.numel for piece in target.pieces) * target.tensor.element_size()
    # Only of sources that are read: a seal is about one publisher only, and each seal needs a connection.
    seals = Seals(
        [
            source.binding.seal if source.binding and parts else None
            for source, parts in zip(sources, blocks, strict=True)
        ]
    )
    return Plan(
        action,
        seals,
        needed=needed,
        tensors=len(targets),
        of_source=tuple(zip(moved, blocks, strict=True)),
        compile_s=time.perf_counter() - begin,
        proof=proof.build(),
        moves=moves,
    )


_Filling = tuple[LocalTensor, Sequence[tuple[int, TensorItem]], Sequence[BoxTransfer]]
"""A target, the sources that hold some of it, and the blocks that are read from them."""


def _alike(one: _Filling, other: _Filling) -> bool:
    """Whether two targets are the same memory and get the same bytes."""
    return same_elements(one[0].tensor) == same_elements(other[0].tensor) and _blocks(one) == _blocks(other)


def _blocks(filling: _Filling) -> list[tuple[int, int, RemoteLayout, Ints]]:
    _, holders, transfers = filling
    found = ((holders[transfer.source], transfer) for transfer in transfers)
    return [
        (index, item.buffer, item.block_at(transfer.source_local, transfer.shape), transfer.target_local)
        for (index, item), transfer in found
    ]


def compile_write(
    arena: RDMABuffer, manifest: Manifest, tensors: Mapping[str, LocalTensor], sums: torch.Tensor | None = None
) -> RDMAAction:
    """The copy of local tensors (of any strides) and their checksums to their places (by the manifest) in one arena."""
    action = RDMAAction()
    written: set[int] = set()  # tied tensors are at one offset
    for name, item in manifest.tensors.items():
        local = tensors[name].tensor
        if item.pieces and item.offset not in written:  # an empty shard has no elements; the first replica is written
            written.add(item.offset)
            action.write_remote(
                arena,
                local,
                layout=RemoteLayout(
                    offset=item.offset, shape=tuple(local.shape), strides=item.strides, itemsize=item.itemsize
                ),
            )
    if sums is not None and manifest.sums is not None:
        layout = RemoteLayout(manifest.sums[1], tuple(sums.shape), (sums.itemsize,), sums.itemsize)
        action.write_remote(arena, sums, layout=layout)
    return action


async def execute(
    action: RDMAAction, nbytes: int, timeout: float, *, fresh: bool = False, description: str = ""
) -> None:
    """Run an action: a small one immediately, a large one without blocking the event loop.

    A ``fresh`` action runs for the first time: peers' memory must be mapped first, which takes time. A large one with a
    ``description`` runs piece by piece if somebody follows its progress.
    """
    if nbytes >= REPORTED_NBYTES and description and is_followed():
        await _execute_in_pieces(action, nbytes, timeout, description)
        return
    if fresh and nbytes > _AT_ONCE_BYTES:
        await asyncio.to_thread(lambda: action.segments)
    with tracing.span("dataplane.transfer", nbytes=nbytes):
        operation = action.submit(timeout=timeout)
        if nbytes <= _AT_ONCE_BYTES:
            with suppress(TransferTimeoutError):  # not done at once: a slow link, so wait as for a large one
                operation.get(_AT_ONCE_S)
        await operation


async def _execute_in_pieces(action: RDMAAction, nbytes: int, timeout: float, description: str) -> None:
    end = time.perf_counter() + timeout
    with (
        tracing.span("dataplane.transfer", nbytes=nbytes),
        track_progress(description, nbytes, "bytes") as task,
    ):
        pieces = await asyncio.to_thread(action.split, _PIECE_BYTES)
        for piece in pieces:
            await asyncio.to_thread(getattr, piece, "segments")  # compiled, which costs nothing the next time
            await piece.submit(timeout=max(end - time.perf_counter(), _AT_ONCE_S))
            task.advance(piece.nbytes)


def check_same(name: str, dtype: str, global_shape: Ints, target: LocalTensor) -> None:
    """Refuse a destination of another dtype or global shape.

    Raises:
        DTypeMismatchError: See above.
        LayoutMismatchError: See above.
    """
    if dtype != str(target.tensor.dtype):
        raise DTypeMismatchError(
            name, f"stored as {dtype}, requested as {target.tensor.dtype}; the store never converts silently"
        )
    if global_shape != target.global_shape:
        raise LayoutMismatchError(
            name, f"stored with the global shape {global_shape}, requested with {target.global_shape}"
        )


class PlanCache:
    """Plans by key, destination and sources; bounded, because a plan keeps its destination's memory alive.

    Per key the last `destinations` fingerprints are kept (a model in two precisions, for example), and for each of them
    the last `sources` sets of bindings (a snapshot alternates between a few arenas, and another reader's copy may be
    read instead).
    """

    def __init__(self, *, keys: int = 32, destinations: int = 2, sources: int = 16) -> None:
        self._destinations, self._sources = destinations, sources
        self._plans: LRUCache[str, LRUCache[Any, LRUCache[tuple[str, ...], Plan]]] = LRUCache(keys)
        self._lock = Lock()

    def find(self, key: str, destination: Any, sources: tuple[str, ...]) -> Plan | None:
        """The plan of an earlier read with the same arguments, if it is still kept."""
        with self._lock:
            known = self._of(key, destination)
            return known.get(sources) if known is not None else None

    def alike(self, key: str, destination: Any) -> Plan | None:
        """The plan by which the destination was filled last, from any source."""
        with self._lock:
            known = self._of(key, destination)
            return known.newest if known is not None else None

    def keep(self, key: str, destination: Any, sources: tuple[str, ...], plan: Plan) -> None:
        """Keep a plan; the least recently used ones are dropped."""
        with self._lock:
            of_key = self._plans.get(key) or self._plans.put(key, LRUCache(self._destinations))
            known = of_key.get(destination) or of_key.put(destination, LRUCache(self._sources))
            known.put(sources, plan)

    def forget(self, key: str) -> None:
        """Drop the plans of a key (its sources failed, or it was deleted)."""
        with self._lock:
            self._plans.pop(key)

    def _of(self, key: str, destination: Any) -> LRUCache[tuple[str, ...], Plan] | None:
        of_key = self._plans.get(key)
        return of_key.get(destination) if of_key is not None else None
