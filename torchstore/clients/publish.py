"""The publisher's side of the store: from values to publications.

*Snapshot*: local tensors are written one-sidedly into an arena of a volume. *Direct*: their own memory is
published and nothing is copied. Either way the put ends with one control call that carries ids, not tensors.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from skipper.dataplane.errors import BufferDroppedError
from skipper.torchstore.algebra.manifest import Binding, Digests, Manifest, Mode
from skipper.torchstore.clients.arenas import Arena, ArenaPool
from skipper.torchstore.clients.batch_put import BatchWriter, Sorted, sort_values
from skipper.torchstore.clients.delta_put import Bases
from skipper.torchstore.clients.direct_memory import DirectMemory
from skipper.torchstore.clients.membership import NOWHERE, Membership
from skipper.torchstore.clients.put_counts import PutCounts, holds_all
from skipper.torchstore.clients.remote import Remote
from skipper.torchstore.clients.staging import Staged, Staging, TransferDtype
from skipper.torchstore.clients.writing import write_arena
from skipper.torchstore.errors import StoreError, StoreTimeoutError, VolumeLostError
from skipper.torchstore.protocol.batches import BatchPublication
from skipper.torchstore.protocol.messages import (
    ArenaFreedError,
    Publication,
    Published,
    Retired,
    UnknownIdError,
)
from skipper.torchstore.protocol.origin import ALONE, Origin, Turn
from skipper.torchstore.support.process import this_process
from skipper.torchstore.support.records import Cost, SyncRecord
from skipper.torchstore.tensors.checksums import digests_of, fill_sums
from skipper.torchstore.tensors.local_tensors import LocalTensor, dtensor_type, fingerprint
from skipper.torchstore.tensors.packing import Packed, pack
from skipper.torchstore.tensors.plan import compile_write
from skipper.torchstore.tensors.quantize import Scales
from skipper.torchstore.tensors.state_dict import flatten
from skipper.torchstore.tensors.values import dump_entries, inline_tensor

_REMEMBERED = 8192


class Publisher:
    """Puts values of one process into one store; keeps its arenas and registrations."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._me = this_process()
        self._arenas = ArenaPool(remote, self._retire)
        self._batches = BatchWriter(remote, self._retire)
        self._direct = DirectMemory()
        self._staging = Staging()
        self._bases = Bases()
        self._packed: dict[str, Packed] = {}
        self._seen: dict[str, int] = {}  # hash of the fingerprint that was put last
        self._sequences = PutCounts()
        self._sent: set[str] = set()  # ids of manifests and bindings that the controller has been sent

    async def put_values(
        self,
        values: Mapping[str, Any],
        timeout: float,
        *,
        checksum: bool = False,
        version: int | None = None,
        publisher: Origin | None = None,
    ) -> tuple[None, SyncRecord | None]:
        """Put plain values, and this rank's shards: all become visible in one step, by one control call.

        Returns:
            Nothing, and what it cost; None when there was nothing to put.
        """
        if not values:
            return None, None
        cost = Cost("put", time.perf_counter())
        key, *_ = values
        value = values[key]
        if len(values) == 1 and publisher is None and version is None and isinstance(value, torch.Tensor):
            small = inline_tensor(value)
            if small:  # the shortest way: plain arguments and a plain answer
                return await self._put_inline(key, small, cost, timeout)
        parts: dict[str, Turn] = {}
        places: dict[str, tuple[int, int]] = {}
        distributed = dtensor_type()
        shared = [name for name, value in values.items() if publisher is not None or isinstance(value, distributed)]
        member = await self._sequences.member(publisher, timeout) if shared else NOWHERE
        with self._sequences.counted(member, parts):
            for name in shared:
                parts[name] = self._sequences.next(name, member, version, alone=False)
                if parts[name] is not ALONE:
                    places[name] = (member.origin.rank, member.origin.size)
            with cost.spent_on("describe"):
                batch = sort_values(
                    values,
                    checksum=checksum,
                    copies=self._remote.info.copies,
                    places=places,
                    by_themselves=version is not None,
                )
            if version is None:
                return await self._put_sorted(key, batch, parts, cost, timeout)
            return await self._put_numbered(batch, parts, member, version, cost, timeout)

    async def _put_inline(self, key: str, value: bytes, cost: Cost, timeout: float) -> tuple[None, SyncRecord]:
        with cost.spent_on("control"):
            number = await self._remote.put_inline(key, value, timeout)
        return None, cost.record(key, number, self._remote.take_calls())

    async def _put_sorted(
        self, key: str, batch: Sorted, parts: Mapping[str, Turn], cost: Cost, timeout: float
    ) -> tuple[None, SyncRecord | None]:
        if len(batch.inline) == 1 and not batch.alone and not batch.shared:  # the shortest way: plain arguments
            return await self._put_inline(key, batch.inline[key], cost, timeout)

        async def publications() -> list[Publication | BatchPublication]:
            sent: list[Publication | BatchPublication] = [*await self._write_alone(batch, parts, None, cost, timeout)]
            try:
                if batch.inline or batch.shared:
                    sent.append(await self._batches.write(batch, cost, timeout))
            except BaseException:
                self._drop(sent)
                raise
            return sent

        published = await self._publish(publications, cost, timeout)
        return None, cost.record(key, published[0].version, self._remote.take_calls())

    async def _put_numbered(
        self, batch: Sorted, parts: Mapping[str, Turn], member: Membership, version: int, cost: Cost, timeout: float
    ) -> tuple[None, SyncRecord | None]:
        """Values whose version the caller has named: each is a publication of its own."""

        async def publications() -> list[Publication]:
            sent = await self._write_alone(batch, parts, version, cost, timeout)
            return sent + [Publication(name, version, self._me, inline=small) for name, small in batch.inline.items()]

        published = await self._publish(publications, cost, timeout)
        shares = [name for name in batch.alone if parts.get(name, ALONE) is not ALONE]
        for name, answer in zip(shares, published, strict=False):  # the answers about shares come first
            self._sequences.settled(name, member, answer)
        name = next(iter((*batch.alone, *batch.inline)))
        return None, cost.record(name, version, self._remote.take_calls())

    async def _write_alone(
        self, batch: Sorted, parts: Mapping[str, Turn], version: int | None, cost: Cost, timeout: float
    ) -> list[Publication]:
        """Write the values of a batch that have arenas of their own; all of them or none."""
        sent: list[Publication] = []
        try:
            for name, packed in batch.alone.items():
                written = await self._snapshot(name, packed, cost, timeout, copies=self._remote.info.copies)
                sent.append(replace(written, version=version, turn=parts.get(name, ALONE)))
        except BaseException:
            self._drop(sent)
            raise
        return sent

    async def put_state_dict(
        self,
        state_dict: Mapping[Any, Any],
        key: str,
        mode: Mode,
        version: int | None,
        keep: int | None,
        transfer_dtype: TransferDtype | None,
        timeout: float,
        *,
        checksum: bool = False,
        delta: bool = False,
        publisher: Origin | None = None,
        verify_replicas: bool = False,
        copies: int = 1,
    ) -> tuple[int, SyncRecord]:
        """Put this rank's part of a state dict as one version; one control call when warm.

        Returns:
            The version's number, and what it cost.
        """
        cost = Cost("put", time.perf_counter())
        with cost.spent_on("describe"):
            leaves, paths = flatten(state_dict)
        member = await self._sequences.member(publisher, timeout)
        alone = holds_all(leaves) if publisher is None and not verify_replicas else False
        turn = self._sequences.next(key, member, version, alone=alone)
        place = (turn.origin.rank, turn.origin.size) if publisher is not None or alone is False else None
        with self._sequences.counted(member, {key: turn}):
            staged: Staged | None = None
            if transfer_dtype is not None:
                staged = await self._stage(key, mode, leaves, transfer_dtype, cost, timeout)
                with cost.spent_on("cast"):
                    leaves, paths = await asyncio.to_thread(staged.fill, leaves), staged.paths(paths)
            scales = staged.scales if staged is not None else {}
            packed = self._pack_state_dict(key, mode, leaves, paths, scales, cost, checksum=checksum, publisher=place)
            names = packed.manifest.objects
            objects = dump_entries(key, {name: leaves[name] for name in names}) if names else b""

            digests: Digests = {}
            if verify_replicas:
                with cost.spent_on("verify"):
                    digests = await asyncio.to_thread(digests_of, packed.tensors)
            sent: list[Publication] = []

            async def publications() -> list[Publication]:
                if mode == "direct":
                    cost.mode = "direct"
                    await _take_sums(packed, cost)
                    with cost.spent_on("compile"):
                        binding, generation = self._direct.publish(key, packed)
                    return [
                        Publication(
                            key,
                            version,
                            self._me,
                            packed.manifest,
                            binding,
                            generation,
                            objects,
                            keep=keep,
                            turn=turn,
                            digests=digests,
                        )
                    ]
                stamp, change = "", None
                if delta:
                    with cost.spent_on("describe"):
                        stamp = Bases.stamp()
                        compared = await asyncio.to_thread(self._bases.compare, key, packed, timeout)
                        change, cost.saved_nbytes = compared
                self._bases.forget(key)  # its arena may be the one that is written to now
                written = await self._snapshot(key, packed, cost, timeout, copies=copies)
                said = replace(written, version=version, objects=objects, keep=keep, stamp=stamp, change=change)
                sent[:] = [replace(said, turn=turn, digests=digests)]
                return sent

            (published,) = await self._publish(publications, cost, timeout)
            if version is not None:
                self._sequences.settled(key, member, published)
            if delta:
                self._bases.published(key, packed, sent[0])
            return published.version, cost.record(key, published.version, self._remote.take_calls())

    def withdraw(self, key: str) -> None:
        """Direct mode: break the seal of what this process has published under ``key``."""
        self._direct.withdraw(key)

    def forget(self, keys: tuple[str, ...]) -> None:
        """The keys were deleted: let go of what belongs to them."""
        for key in keys:
            self._arenas.forget(key)
            self._direct.forget(key)
            self._packed.pop(key, None)
            self._bases.forget(key)
            self._seen.pop(key, None)
            self._staging.forget(key)

    def close(self) -> None:
        """Let go of everything; versions that this process published in direct mode end here."""
        self._direct.close()
        self._staging.close()
        self._packed.clear()

    # Steps ----------------------------------------------------------------------------------------------

    async def _stage(
        self, key: str, mode: Mode, leaves: Mapping[str, Any], dtype: TransferDtype, cost: Cost, timeout: float
    ) -> Staged:
        """Room for the leaves in the dtype in which they travel, free to be filled.

        In direct mode readers read the copies, so these are not written before the readers of the last version
        have left; the originals are free again when the put returns.
        """
        with cost.spent_on("compile"):
            staged = self._staging.of(key, leaves, dtype, everything=mode == "direct")
        if mode == "direct" and self._direct.holds(key):
            with cost.spent_on("control"):
                await self._remote.fence(key, close=True, timeout=timeout)
            self.withdraw(key)
        return staged

    def _pack_state_dict(
        self,
        key: str,
        mode: Mode,
        leaves: Mapping[str, Any],
        paths: Mapping[str, Any],
        scales: Mapping[str, Scales],
        cost: Cost,
        *,
        checksum: bool,
        publisher: tuple[int, int] | None,
    ) -> Packed:
        """Describe a state dict, or find that it is the one of last time."""
        with cost.spent_on("describe"):
            blocks = tuple((name, scale.block) for name, scale in scales.items())
            mark = (mode, checksum, blocks, publisher, fingerprint(leaves))
            found = self._direct.registered(key, mark) if mode == "direct" else self._packed.get(key)
        if found is not None and found.mark == mark:
            return found
        cost.hit = False
        with cost.spent_on("compile"):
            tensors = {name: value for name, value in leaves.items() if isinstance(value, torch.Tensor | LocalTensor)}
            objects = tuple(name for name in leaves if name not in tensors)
            packed = pack(
                key,
                "state_dict",
                mode,
                tensors,
                paths=paths,
                objects=objects,
                mark=mark,
                checksum=checksum,
                scales=scales,
                publisher=publisher,
            )
            # A plan keeps its tensors alive. Parameters come again step after step, but a temporary copy
            # that comes once must not be held: only what is seen twice is kept.
            self._packed.pop(key, None)
            if mode == "snapshot" and self._seen.get(key) == hash(mark):
                self._packed[key] = packed
            self._seen[key] = hash(mark)
            return packed

    async def _snapshot(self, key: str, packed: Packed, cost: Cost, timeout: float, *, copies: int = 1) -> Publication:
        cost.mode = "snapshot"
        await _take_sums(packed, cost)
        written: list[Arena] = []
        while packed.nbytes and len(written) < copies:
            volumes = self._remote.place(copies)
            try:
                written.append(await self._write_to(volumes[len(written)], key, packed, cost, timeout))
            except BaseException as error:
                for arena in written:  # nothing is published of what is there
                    self._arenas.give_back(arena)
                written.clear()
                if copies == 1 or not isinstance(error, VolumeLostError):
                    raise
                self._remote.lost.add(error.volume)  # its neighbour takes its place
                self._arenas.lose(error.volume)
        bindings = tuple(arena.binding for arena in written)
        first = bindings[0] if bindings else None
        return Publication(key, None, self._me, packed.manifest, first, copies=bindings[1:])

    async def _write_to(self, volume: str, key: str, packed: Packed, cost: Cost, timeout: float) -> Arena:
        """Write a value into an arena of a volume."""
        while True:
            with cost.spent_on("control"):
                arena = await self._arenas.take(key, packed.nbytes, volume, timeout)
            try:
                await self._write(arena, packed, cost, timeout)
                return arena
            except BufferDroppedError as error:
                # The volume has freed it since, because the key was deleted elsewhere; a new one is there.
                self._arenas.discard(arena.binding.id)
                if not arena.used:
                    raise VolumeLostError(volume, "it has let go of its memory") from error

    async def _write(self, arena: Arena, packed: Packed, cost: Cost, timeout: float) -> None:
        write = arena.write if packed.mark and arena.mark == packed.mark else None
        fresh = write is None
        if write is None:
            cost.hit = False
            with cost.spent_on("compile"):
                write = compile_write(arena.binding.buffers[0], packed.manifest, packed.tensors, packed.sums)
        await write_arena(self._remote, self._arenas, arena, write, packed.nbytes, cost, timeout, fresh=fresh)
        if self._packed.get(arena.key) is packed:
            arena.mark, arena.write = packed.mark, write

    async def _publish(
        self, make: Callable[[], Awaitable[Sequence[Publication | BatchPublication]]], cost: Cost, timeout: float
    ) -> tuple[Published, ...]:
        """Tell the controller; make the publications again if their key was deleted under them."""
        while True:
            publications = await make()
            try:
                published = await self._tell(publications, cost, timeout)
                break
            except StoreTimeoutError:  # it may have been published
                raise
            except ArenaFreedError as error:
                self._arenas.discard(error.arena)
                self._batches.discard(error.arena)
                for publication in publications:
                    for holder in (publication.binding, *publication.copies):
                        if isinstance(holder, Binding) and holder.id != error.arena:
                            self._retire(Retired(holder.id, holder.volume))
            except StoreError:  # of the shares beside a batch, which was not added then
                self._drop([publication for publication in publications if isinstance(publication, BatchPublication)])
                raise
        if len(self._sent) > _REMEMBERED:
            self._sent.clear()
        for publication in publications:
            self._sent.update(
                record.id
                for record in (publication.manifest, publication.binding, *publication.copies)
                if isinstance(record, Manifest | Binding)
            )
        for answer in published:
            for retired in answer.retired:
                self._retire(retired)
        return published

    def _retire(self, retired: Retired) -> None:
        if self._batches.holds(retired.binding):
            self._batches.retire(retired)
        elif retired.volume:
            self._arenas.recycle(retired)
        else:
            self._direct.retire(retired.binding)

    def _drop(self, publications: Sequence[Publication | BatchPublication]) -> None:
        """What was written for these will not be published."""
        for publication in publications:
            for holder in (publication.binding, *publication.copies):
                if isinstance(holder, Binding):
                    self._arenas.drop(holder.id)
                    self._batches.drop(holder.id)

    async def _tell(
        self, publications: Sequence[Publication | BatchPublication], cost: Cost, timeout: float
    ) -> tuple[Published, ...]:
        with cost.spent_on("control"):
            try:
                return await self._remote.publish(tuple(map(self._brief, publications)), timeout)
            except UnknownIdError:  # the controller remembers a bounded number of records
                return await self._remote.publish(tuple(publications), timeout)

    def _brief(self, publication: Publication | BatchPublication) -> Publication | BatchPublication:
        """The publication with ids in place of what the controller knows."""
        if isinstance(publication, BatchPublication):
            return publication.brief(self._sent)
        manifest, binding = publication.manifest, publication.binding
        if isinstance(manifest, Manifest) and manifest.id in self._sent:
            manifest = manifest.id
        if isinstance(binding, Binding) and binding.id in self._sent:
            binding = binding.id
        copies = tuple(
            copy.id if isinstance(copy, Binding) and copy.id in self._sent else copy for copy in publication.copies
        )
        return replace(publication, manifest=manifest, binding=binding, copies=copies)


async def _take_sums(packed: Packed, cost: Cost) -> None:
    """The sums of the tensors as they are now, before anything of them is copied or read."""
    if packed.sums is not None:
        with cost.spent_on("verify"):
            await asyncio.to_thread(fill_sums, packed.sums, packed.manifest.tensors, packed.tensors)
