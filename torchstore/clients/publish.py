"""The publisher's side of the store: from values to publications.

*Snapshot*: local tensors are written one-sidedly into an arena of a volume (`SnapshotPuts`). *Direct*: their own memory
is published and nothing is copied (`DirectPuts`). In both cases the put ends with one control call that has ids, not
tensors.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch

from skipper.torchstore.algebra.manifest import Binding, Digests, Manifest, Path
from skipper.torchstore.clients.batch_put import BatchWriter, Sorted, sort_values
from skipper.torchstore.clients.direct_put import DirectPuts
from skipper.torchstore.clients.membership import NOWHERE, Membership, PutCounts, holds_all
from skipper.torchstore.clients.remote import RemoteStore
from skipper.torchstore.clients.requests import StateDictPut
from skipper.torchstore.clients.snapshot_put import SnapshotPuts
from skipper.torchstore.clients.staging import Staged, Staging, TransferDtype
from skipper.torchstore.errors import StoreError, StoreTimeoutError
from skipper.torchstore.protocol.batches import BatchPublication
from skipper.torchstore.protocol.messages import (
    ArenaFreedError,
    Publication,
    Published,
    Retired,
    UnknownIdError,
)
from skipper.torchstore.protocol.origin import ALONE, Origin, Turn, read_publisher
from skipper.torchstore.support.process import this_process
from skipper.torchstore.support.records import Cost, SyncRecord
from skipper.torchstore.tensors.certifying import certifiable_tiles, check_certify
from skipper.torchstore.tensors.checksums import digests_of
from skipper.torchstore.tensors.local_tensors import LocalTensor, dtensor_type, fingerprint
from skipper.torchstore.tensors.packing import Packed, pack
from skipper.torchstore.tensors.quantization import Quantized
from skipper.torchstore.tensors.state_dict import flatten
from skipper.torchstore.tensors.tiles import TensorsTiles
from skipper.torchstore.tensors.values import dump_entries, inline_tensor

_REMEMBERED = 8192

P = TypeVar("P", bound=Publication | BatchPublication)


class StateDictPuts(Protocol):
    """How state dicts are put in one mode: by copies in volumes, or in their own memory."""

    async def free_staged(self, key: str, cost: Cost, timeout: float) -> None:
        """Return when converted copies of the last put of a key may be overwritten."""

    def find(self, key: str, mark: tuple[Any, ...]) -> Packed | None:
        """The description of the last put of a key, if its tensors have this fingerprint."""

    def remember(self, key: str, packed: Packed) -> None:
        """Keep a new description for the next put."""

    async def write(self, put: StateDictPut, packed: Packed, cost: Cost) -> Publication:
        """Bring the bytes to where readers read them. Returns the known part of the publication."""

    def published(self, put: StateDictPut, packed: Packed, publication: Publication) -> None:
        """The controller has been told."""


@dataclass(frozen=True, slots=True)
class _Contents:
    """A flattened state dict.

    Attributes:
        leaves: Its entries by name, in the dtypes in which they are sent.
        paths: How the names lead back into the nested dict.
        quantized: The quantized entries.
        publisher: Which publisher out of how many this is; None: the mesh of the tensors decides.
    """

    leaves: Mapping[str, Any]
    paths: Mapping[str, Path]
    quantized: Mapping[str, Quantized]
    publisher: tuple[int, int] | None


class Publisher:
    """Puts values of one process into one store; keeps its arenas and registrations."""

    def __init__(self, remote: RemoteStore) -> None:
        self._remote = remote
        self._me = this_process()
        self.snapshots = SnapshotPuts(remote, self._retire)
        self._direct = DirectPuts(remote)
        self._batches = BatchWriter(remote, self._retire)
        self._staging = Staging()
        self._put_counts = PutCounts()
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
            if small:  # the shortest path: plain arguments and a plain answer
                return await self._put_inline(key, small, cost, timeout)
        parts: dict[str, Turn] = {}
        places: dict[str, tuple[int, int]] = {}
        distributed = dtensor_type()
        shared = [name for name, value in values.items() if publisher is not None or isinstance(value, distributed)]
        member = await self._put_counts.member(publisher, timeout) if shared else NOWHERE
        with self._put_counts.counted(member, parts):
            for name in shared:
                parts[name] = self._put_counts.next(name, member, version, alone=False)
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
        begin = time.perf_counter()
        number = await self._remote.put_inline(key, value, timeout)
        cost.control_s = time.perf_counter() - begin
        return None, cost.record(key, number, self._remote.take_calls())

    async def _put_sorted(
        self, key: str, batch: Sorted, parts: Mapping[str, Turn], cost: Cost, timeout: float
    ) -> tuple[None, SyncRecord | None]:
        if len(batch.inline) == 1 and not batch.alone and not batch.shared:  # the shortest path: plain arguments
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

        _, published = await self._publish(publications, cost, timeout)
        return None, cost.record(key, published[0].version, self._remote.take_calls())

    async def _put_numbered(
        self, batch: Sorted, parts: Mapping[str, Turn], member: Membership, version: int, cost: Cost, timeout: float
    ) -> tuple[None, SyncRecord | None]:
        """Values whose version the caller has given: each is a publication of its own."""

        async def publications() -> list[Publication]:
            sent = await self._write_alone(batch, parts, version, cost, timeout)
            return sent + [Publication(name, version, self._me, inline=small) for name, small in batch.inline.items()]

        _, published = await self._publish(publications, cost, timeout)
        shares = [name for name in batch.alone if parts.get(name, ALONE) is not ALONE]
        for name, answer in zip(shares, published, strict=False):  # the answers about shares come first
            self._put_counts.settled(name, member, answer)
        name = next(iter((*batch.alone, *batch.inline)))
        return None, cost.record(name, version, self._remote.take_calls())

    async def _write_alone(
        self, batch: Sorted, parts: Mapping[str, Turn], version: int | None, cost: Cost, timeout: float
    ) -> list[Publication]:
        """Write the values of a batch that have arenas of their own; all of them or none."""
        sent: list[Publication] = []
        try:
            for name, packed in batch.alone.items():
                written = await self.snapshots.copy(name, packed, self._remote.info.copies, cost, timeout)
                sent.append(replace(written, version=version, turn=parts.get(name, ALONE)))
        except BaseException:
            self._drop(sent)
            raise
        return sent

    async def put_state_dict(self, put: StateDictPut) -> tuple[int, SyncRecord]:
        """Put this rank's part of a state dict as one version; one control call when warm.

        ``put`` has a state dict, and every option is set.

        Returns:
            The version's number, and what it cost.
        """
        cost, key = Cost("put", time.perf_counter()), put.key
        puts: StateDictPuts = self._direct if put.mode == "direct" else self.snapshots
        with cost.spent_on("describe"):
            leaves, paths = flatten(put.state_dict or {})
        publisher = read_publisher(put.publisher)
        member = await self._put_counts.member(publisher, put.timeout)
        alone = holds_all(leaves) if publisher is None and not put.verify_replicas else False
        turn = self._put_counts.next(key, member, put.version, alone=alone)
        place = (turn.origin.rank, turn.origin.size) if publisher is not None or alone is False else None
        with self._put_counts.counted(member, {key: turn}):
            quantized: Mapping[str, Quantized] = {}
            if put.transfer_dtype is not None:
                staged = await self._stage(put, puts, put.transfer_dtype, leaves, cost)
                with cost.spent_on("cast"):
                    leaves = await asyncio.to_thread(staged.fill, leaves, put.transfer_dtype)
                paths, quantized = staged.paths(paths), staged.quantized
            packed = self._describe(put, puts, _Contents(leaves, paths, quantized, place), cost)
            names = packed.manifest.objects
            objects = dump_entries(key, {name: leaves[name] for name in names}) if names else b""
            digests: Digests = {}
            if put.verify_replicas:
                with cost.spent_on("verify"):
                    digests = await asyncio.to_thread(digests_of, packed.tensors)

            tiles: TensorsTiles | None = None
            forms = check_certify(False if put.certify is None else put.certify)
            if forms is not None:
                with cost.spent_on("verify"):
                    tiles = await asyncio.to_thread(certifiable_tiles, packed, forms)

            async def publications() -> list[Publication]:
                written = await puts.write(put, packed, cost)
                return [replace(written, objects=objects, keep=put.keep, turn=turn, digests=digests, tiles=tiles)]

            (sent,), (published,) = await self._publish(publications, cost, put.timeout)
            if put.version is not None:
                self._put_counts.settled(key, member, published)
            puts.published(put, packed, sent)
            return published.version, cost.record(key, published.version, self._remote.take_calls())

    def withdraw(self, key: str) -> None:
        """Direct mode: break the seal of what this process has published under ``key``."""
        self._direct.withdraw(key)

    def forget(self, keys: tuple[str, ...]) -> None:
        """The keys were deleted: release what belongs to them."""
        for key in keys:
            self.snapshots.forget(key)
            self._direct.forget(key)
            self._staging.forget(key)

    def close(self) -> None:
        """Release everything; versions that this process published in direct mode end here."""
        self._direct.close()
        self._staging.close()
        self.snapshots.close()

    # Steps ----------------------------------------------------------------------------------------------

    async def _stage(
        self, put: StateDictPut, puts: StateDictPuts, dtype: TransferDtype, leaves: Mapping[str, Any], cost: Cost
    ) -> Staged:
        """Room for the leaves in the dtype in which they are sent, free to be filled.

        In direct mode readers read the copies, so these are not written before the readers of the last version
        have left; the originals are free again when the put returns.
        """
        with cost.spent_on("compile"):
            staged = self._staging.of(put.key, leaves, dtype, everything=put.mode == "direct")
        await puts.free_staged(put.key, cost, put.timeout)
        return staged

    def _describe(self, put: StateDictPut, puts: StateDictPuts, contents: _Contents, cost: Cost) -> Packed:
        """Describe a state dict, or find that it is the one of last time."""
        leaves, checksum = contents.leaves, bool(put.checksum)
        with cost.spent_on("describe"):
            scaled = {name: made.item for name, made in contents.quantized.items()}
            mark = (put.mode, checksum, tuple(scaled.items()), contents.publisher, fingerprint(leaves))
            found = puts.find(put.key, mark)
        if found is not None:
            return found
        cost.hit = False
        with cost.spent_on("compile"):
            tensors = {name: value for name, value in leaves.items() if isinstance(value, torch.Tensor | LocalTensor)}
            packed = pack(
                put.key,
                "state_dict",
                put.mode,
                tensors,
                paths=contents.paths,
                objects=tuple(name for name in leaves if name not in tensors),
                mark=mark,
                checksum=checksum,
                scaled=scaled,
                publisher=contents.publisher,
            )
            puts.remember(put.key, packed)
            if put.mode == "direct":
                self.snapshots.release(put.key)
            return packed

    async def _publish(
        self, make: Callable[[], Awaitable[Sequence[P]]], cost: Cost, timeout: float
    ) -> tuple[Sequence[P], tuple[Published, ...]]:
        """Tell the controller; make the publications again if their key was deleted in the meantime.

        Returns:
            The publications that it was told of, and its answers.
        """
        while True:
            publications = await make()
            try:
                published = await self._tell(publications, cost, timeout)
                break
            except StoreTimeoutError:  # it may have been published
                raise
            except ArenaFreedError as error:
                self.snapshots.arenas.discard(error.arena)
                self._batches.arenas.discard(error.arena)
                for publication in publications:
                    for holder in (publication.binding, *publication.copies):
                        if isinstance(holder, Binding) and holder.id != error.arena:
                            self._retire(Retired(holder.id, holder.volume))
            except StoreError:  # a share was refused, and the batch that came with it was not added
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
        return publications, published

    def _retire(self, retired: Retired) -> None:
        if self._batches.arenas.holds(retired.binding):
            self._batches.arenas.recycle(retired)
        elif retired.volume:
            self.snapshots.arenas.recycle(retired)
        else:
            self._direct.retire(retired.binding)

    def _drop(self, publications: Sequence[Publication | BatchPublication]) -> None:
        """Memory that was written for these will not be published."""
        for publication in publications:
            for holder in (publication.binding, *publication.copies):
                if isinstance(holder, Binding):
                    self.snapshots.arenas.drop(holder.id)
                    self._batches.arenas.drop(holder.id)

    async def _tell(
        self, publications: Sequence[Publication | BatchPublication], cost: Cost, timeout: float
    ) -> tuple[Published, ...]:
        with cost.spent_on("control"):
            try:
                return await self._remote.publish(tuple(map(self._brief, publications)), timeout)
            except UnknownIdError:  # the controller remembers a bounded number of records
                return await self._remote.publish(tuple(publications), timeout)

    def _brief(self, publication: Publication | BatchPublication) -> Publication | BatchPublication:
        """The publication with ids in place of records that the controller has."""
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
