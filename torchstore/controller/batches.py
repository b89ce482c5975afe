"""Batches in a store's controller: all versions of a batch are added, and leased, in one step. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

from skipper.dataplane.uncollected import uncollected
from skipper.torchstore.algebra.manifest import WHOLE, Binding, Manifest
from skipper.torchstore.algebra.sections import Section
from skipper.torchstore.controller.grants import grant_all
from skipper.torchstore.controller.history import History
from skipper.torchstore.controller.index import Index
from skipper.torchstore.controller.ledger import Ledger, SharedArenas
from skipper.torchstore.controller.members import KnownRecords
from skipper.torchstore.controller.version import Contribution, Version
from skipper.torchstore.errors import KeyNotFoundError
from skipper.torchstore.protocol.batches import BatchGrant, BatchPublication, Columns
from skipper.torchstore.protocol.messages import ArenaFreedError, Grant, Wanted
from skipper.torchstore.support.process import ProcessId
from skipper.torchstore.support.serial import Serial


class Batches:
    """Adds and leases the versions of batches."""

    def __init__(self, index: Index, known: KnownRecords, ledger: Ledger, shared: SharedArenas) -> None:
        self._index = index
        self._known = known
        self._ledger = ledger
        self._shared = shared
        self._numbers = Serial()
        self._leases: dict[int, tuple[ProcessId, list[tuple[History, Version, int]]]] = {}

    @uncollected()
    def contributions(self, batch: BatchPublication, now: float) -> list[tuple[str, Contribution]]:
        """The checked parts of a publication, by key; nothing is added yet.

        Raises:
            UnknownIdError: It contains only the id of its arena, which is not remembered.
            ArenaFreedError: Its arena is gone.
        """
        writer = batch.writer
        part = WHOLE
        found = [
            (key, Contribution(writer, part, None, None, inline=value, arrived=now))
            for key, value in (batch.inline or {}).items()
        ]
        arena = self._known.binding(batch.binding)
        if arena is None:
            return found
        if self._ledger.is_freed(arena):
            raise ArenaFreedError(arena.id)
        self._ledger.in_use(arena)
        columns = Columns.decode(batch.columns)
        sections: dict[int, Section] = {}
        for key, kind, offset, nbytes in zip(columns.keys, columns.kinds, columns.offsets, columns.sizes, strict=True):
            section = sections.get(offset)
            if section is None:
                section = sections[offset] = Section(arena, offset, nbytes)
            found.append((key, Contribution(writer, part, batch.manifests[kind], section, arrived=now)))
        return found

    @uncollected()
    def add(self, contributions: Sequence[tuple[str, Contribution]]) -> int:
        """Add them: each becomes the next version of its key. Returns the number of the first."""
        first = 0
        for _, contribution in contributions:
            if isinstance(contribution.binding, Section):
                self._shared.use(contribution.writer, contribution.binding)
        for key, contribution in contributions:
            published = self._index.contribute(key, contribution, None)
            first = first or published.version
        return first

    @uncollected()
    def grant(self, keys: tuple[str, ...], reader: ProcessId, waited_s: float) -> BatchGrant | None:
        """Leases on the newest versions of all keys; None while one of them must be awaited.

        Raises:
            KeyNotFoundError: A key does not exist and none is being published.
            StoreError: Its bytes are lost.
        """
        found: list[tuple[str, History, Version, str]] = []
        for key in keys:
            where = self._index.find(Wanted(key))
            if where is None:
                return None
            found.append((key, *where))
        others = self._others(found, reader, waited_s)
        if others is None:
            return None
        return self._grant(found, others, reader, waited_s)

    def release(self, lease: int) -> None:
        """Give back all leases of a batch; an unknown one (its holder was considered dead) is ignored."""
        _, held = self._leases.pop(lease, (None, []))
        for history, version, number in held:
            if version.leases.pop(number, None) is not None and history.draining:
                self._index.settle(history)

    def process_died(self, process: ProcessId) -> None:
        """Forget the leases of a dead process; the index has dropped them."""
        for lease in [lease for lease, (reader, _) in self._leases.items() if reader == process]:
            del self._leases[lease]

    def leases(self) -> tuple[dict[ProcessId, set[int]], set[int]]:
        """The leases on batches, by holder, and the numbers of the leases on versions within them."""
        holders: dict[ProcessId, set[int]] = {}
        within: set[int] = set()
        for lease, (reader, held) in self._leases.items():
            holders.setdefault(reader, set()).add(lease)
            within.update(number for _, _, number in held)
        return holders, within

    def clear(self) -> None:
        """Forget everything: the store is shut down."""
        self._leases.clear()

    def _others(
        self, found: list[tuple[str, History, Version, str]], reader: ProcessId, waited_s: float
    ) -> dict[int, Grant] | None:
        """Grants of items that are neither inline nor plain tensors in one piece, by position."""
        at = [position for position, (_, _, version, item) in enumerate(found) if not _is_plain(version, item)]
        if not at:
            return {}
        grants = grant_all(self._index, tuple(Wanted(found[position][0]) for position in at), reader, waited_s)
        return None if grants is None else dict(zip(at, grants, strict=True))

    def _grant(
        self,
        found: list[tuple[str, History, Version, str]],
        others: dict[int, Grant],
        reader: ProcessId,
        waited_s: float,
    ) -> BatchGrant:
        arenas: dict[str, tuple[int, Binding]] = {}
        manifests: dict[str, tuple[int, Manifest]] = {}
        inline: dict[int, bytes] = {}
        placed: list[tuple[int, int, int, int, int]] = []
        held: list[tuple[History, Version, int]] = []
        for position, (_, history, version, _) in enumerate(found):
            if position in others:
                continue
            (only,) = version.contributions.values()
            if only.inline:
                inline[position] = only.inline
                continue
            manifest, binding = only.manifest, only.binding
            if manifest is None or binding is None:
                raise KeyNotFoundError(history.key)
            offset, nbytes = (binding.offset, binding.nbytes) if isinstance(binding, Section) else (0, -1)
            arena = binding.arena if isinstance(binding, Section) else binding
            where, _ = arenas.setdefault(arena.id, (len(arenas), arena))
            kind, _ = manifests.setdefault(manifest.id, (len(manifests), manifest))
            placed.append((position, where, kind, offset, nbytes))
            held.append((history, version, history.lease(version, reader)))
        lease = next(self._numbers) if held else 0
        if held:
            self._leases[lease] = (reader, held)
        return BatchGrant(
            lease,
            tuple(version.number for _, _, version, _ in found),
            inline,
            tuple(arena for _, arena in arenas.values()),
            tuple(manifest for _, manifest in manifests.values()),
            tuple(placed),
            others,
            waited_s,
        )


def _is_plain(version: Version, item: str) -> bool:
    """Whether a reader needs only a manifest and the place of the bytes in a volume."""
    if item or len(version.contributions) != 1:
        return False
    (only,) = version.contributions.values()
    if only.inline:
        return True
    manifest, binding = only.manifest, only.binding
    return (
        manifest is not None
        and binding is not None
        and binding.mode == "snapshot"
        and manifest.kind == "value"
        and manifest.sums is None
        and not only.copies
        and not manifest.part.mesh_shape
    )
