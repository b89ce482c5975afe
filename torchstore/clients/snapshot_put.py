"""Snapshot puts: a version is a copy in an arena of a volume, or in arenas of several volumes."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from skipper.dataplane.errors import BufferDroppedError, DataplaneError
from skipper.torchstore.algebra.manifest import Binding
from skipper.torchstore.clients.arenas import ArenaPool, VolumeArena
from skipper.torchstore.clients.remote import RemoteStore
from skipper.torchstore.clients.requests import StateDictPut
from skipper.torchstore.errors import VolumeLostError
from skipper.torchstore.protocol.messages import Change, Publication, Retired
from skipper.torchstore.support.process import this_process
from skipper.torchstore.support.records import Cost
from skipper.torchstore.tensors.delta import changed_cells, pack_flags
from skipper.torchstore.tensors.packing import Packed, take_sums
from skipper.torchstore.tensors.plan import compile_write


@dataclass(frozen=True, slots=True)
class _Base:
    """A publication of this process."""

    stamp: str
    manifest: str
    binding: Binding | None


class Bases:
    """The last put of one publisher under each key, if a delta may be based on it."""

    def __init__(self) -> None:
        self._last: dict[str, _Base] = {}

    def compare(self, key: str, packed: Packed, timeout: float) -> tuple[Change | None, int]:
        """The changes from the last publication. Call this before the next one is written.

        Returns:
            The change, or None if there is nothing to compare with (any more), and the bytes of unchanged cells.
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


class SnapshotPuts:
    """The copies of one process in the volumes of a store. Has the interface `publish.StateDictPuts`.

    Attributes:
        arenas: The arenas with the copies.
    """

    def __init__(self, remote: RemoteStore, on_retired: Callable[[Retired], None]) -> None:
        self.arenas = ArenaPool(remote, on_retired)
        self._remote = remote
        self._bases = Bases()
        self._packed: dict[str, Packed] = {}
        self._seen: dict[str, int] = {}  # hash of the fingerprint that was put last

    async def free_staged(self, key: str, cost: Cost, timeout: float) -> None:
        """Do nothing: readers read the copy in the volume, never the converted one."""

    def find(self, key: str, mark: tuple[Any, ...]) -> Packed | None:
        """The description of the last put, if its tensors have this fingerprint."""
        found = self._packed.get(key)
        return found if found is not None and found.mark == mark else None

    def remember(self, key: str, packed: Packed) -> None:
        """Keep a description for the next put, if it came twice.

        A plan keeps its tensors alive. Parameters come again step after step, but a temporary copy that comes once must
        not be held.
        """
        self._packed.pop(key, None)
        if self._seen.get(key) == hash(packed.mark):
            self._packed[key] = packed
        self._seen[key] = hash(packed.mark)

    def release(self, key: str) -> None:
        """Release the tensors of the last put: the key was put in the other mode."""
        self._packed.pop(key, None)
        self._seen.pop(key, None)

    async def write(self, put: StateDictPut, packed: Packed, cost: Cost) -> Publication:
        """Copy a state dict into its volumes; with ``delta`` compare it with the last one first.

        Raises:
            VolumeLostError: A volume is dead, and there is no other.
            StoreTimeoutError: The copy was not done in time.
        """
        stamp, change = "", None
        if put.delta:
            with cost.spent_on("describe"):
                stamp = Bases.stamp()
                compared = await asyncio.to_thread(self._bases.compare, put.key, packed, put.timeout)
                change, cost.saved_nbytes = compared
        self._bases.forget(put.key)  # its arena may be the one that is written to now
        written = await self.copy(put.key, packed, put.copies or 1, cost, put.timeout)
        return replace(written, version=put.version, stamp=stamp, change=change)

    def published(self, put: StateDictPut, packed: Packed, publication: Publication) -> None:
        """The next put with ``delta`` may be based on this one."""
        if put.delta:
            self._bases.published(put.key, packed, publication)

    async def copy(self, key: str, packed: Packed, copies: int, cost: Cost, timeout: float) -> Publication:
        """Copy a value into as many volumes as it has copies.

        Raises:
            VolumeLostError: A volume is dead, and there is no other.
            StoreTimeoutError: The copy was not done in time.
        """
        cost.mode = "snapshot"
        await take_sums(packed, cost)
        written: list[VolumeArena] = []
        while packed.nbytes and len(written) < copies:
            volumes = self._remote.place(copies)
            try:
                written.append(await self._write_to(volumes[len(written)], key, packed, cost, timeout))
            except BaseException as error:
                for arena in written:  # nothing of it is published
                    self.arenas.give_back(arena)
                written.clear()
                if copies == 1 or not isinstance(error, VolumeLostError):
                    raise
                self._remote.lost.add(error.volume)  # another volume replaces it
                self.arenas.lose(error.volume)
        bindings = tuple(arena.binding for arena in written)
        first = bindings[0] if bindings else None
        return Publication(key, None, this_process(), packed.manifest, first, copies=bindings[1:])

    def forget(self, key: str) -> None:
        """The key was deleted: release what belongs to it."""
        self.arenas.forget(key)
        self._packed.pop(key, None)
        self._seen.pop(key, None)
        self._bases.forget(key)

    def close(self) -> None:
        """Release the tensors; versions stay in the volumes."""
        self._packed.clear()

    async def _write_to(self, volume: str, key: str, packed: Packed, cost: Cost, timeout: float) -> VolumeArena:
        """Write a value into an arena of a volume."""
        while True:
            with cost.spent_on("control"):
                arena = await self.arenas.take(key, packed.nbytes, volume, timeout)
            try:
                await self._write(arena, packed, cost, timeout)
                return arena
            except BufferDroppedError as error:
                # The volume has freed it since, because the key was deleted elsewhere; a new one is there.
                self.arenas.discard(arena.binding.id)
                if not arena.used:
                    raise VolumeLostError(volume, "it has released its memory") from error

    async def _write(self, arena: VolumeArena, packed: Packed, cost: Cost, timeout: float) -> None:
        write = arena.write if packed.mark and arena.mark == packed.mark else None
        fresh = write is None
        if write is None:
            cost.hit = False
            with cost.spent_on("compile"):
                write = compile_write(arena.binding.buffers[0], packed.manifest, packed.tensors, packed.sums)
        await self.arenas.write(arena, write, packed.nbytes, cost, timeout, fresh=fresh)
        if self._packed.get(arena.key) is packed:
            arena.mark, arena.write = packed.mark, write
