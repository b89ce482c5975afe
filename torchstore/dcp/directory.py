"""From the store to a directory and back, in the file format of `torch.distributed.checkpoint`.

Both functions run on every rank of a process group, or in a single process. The ranks divide the parts of the
checkpoint among themselves, independently of the mesh that has put them, and each rank moves its own parts.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from skipper.torchstore.clients.pinning import PinnedBlock, PinnedVersion
from skipper.torchstore.clients.registry import DEFAULT_STORE_NAME
from skipper.torchstore.clients.remote import DEFAULT_TIMEOUT_S
from skipper.torchstore.clients.requests import VersionSelector
from skipper.torchstore.dcp.calls import BlockingStore, key_of
from skipper.torchstore.dcp.records import (
    Steps,
    boxes_of,
    encode,
    nbytes_of,
    part_of,
    paths_of,
    properties_of,
    written_nbytes,
)
from skipper.torchstore.dcp.writer import RankShare
from skipper.torchstore.errors import StoreError
from skipper.torchstore.tensors.state_dict import Flattened, steps_of

Item = TypeVar("Item")


def save_to_directory(
    key: str,
    directory: str | os.PathLike[str],
    *,
    version: VersionSelector = "latest",
    store_name: str = DEFAULT_STORE_NAME,
    process_group: dist.ProcessGroup | None = None,
    timeout: float = DEFAULT_TIMEOUT_S,
) -> int:
    """Write a version of a state dict to a directory that `torch.distributed.checkpoint.load` reads.

    A rank holds one part of a tensor at a time, not the checkpoint.

    Args:
        key: The key under which it was put or saved.
        directory: The directory, which is created if necessary; an earlier checkpoint in it is replaced.
        version: The version; all ranks write the same.
        store_name: Name of the store.
        process_group: The ranks that share the work; None: all of them, or this process if there is no group.
        timeout: Timeout of each operation on the store, in seconds.

    Returns:
        The version's number.

    Raises:
        KeyNotFoundError: There is none.
        StoreError: It cannot be read.
        CheckpointException: (torch's) the directory cannot be written.
    """
    store = BlockingStore(store_name, timeout)
    planner = _SavePlanner(store, key_of(key), version)
    try:
        with _by_name():
            save(
                {},
                storage_writer=FileSystemWriter(directory, overwrite=True),
                planner=planner,
                process_group=process_group,
                no_dist=not dist.is_initialized(),
            )
        return planner.pinned.version
    finally:
        planner.close()


def load_from_directory(
    directory: str | os.PathLike[str],
    key: str,
    *,
    version: int | None = None,
    keep: int | None = None,
    copies: int | None = None,
    checksum: bool | None = None,
    store_name: str = DEFAULT_STORE_NAME,
    process_group: dist.ProcessGroup | None = None,
    timeout: float = DEFAULT_TIMEOUT_S,
) -> int:
    """Put a checkpoint that `torch.distributed.checkpoint.save` has written to a directory as one version of a key.

    Entries that are not tensors are unpickled, as ``load`` does: read only directories that you trust.

    Args:
        directory: The directory of the checkpoint.
        key: The key to put it under.
        version: Its number, higher than those before; None: the next one.
        keep: As in `torchstore.put_state_dict`, and so are ``copies`` and ``checksum``.
        copies: See ``keep``.
        checksum: See ``keep``.
        store_name: Name of the store.
        process_group: The ranks that share the work; None: all of them, or this process if there is no group.
        timeout: Timeout of each operation on the store, in seconds.

    Returns:
        The version's number. Other ranks may not have put their parts yet.

    Raises:
        CheckpointException: (torch's) the directory holds no checkpoint.
        StoreError: It cannot be put.
    """
    store = BlockingStore(store_name, timeout)
    planner = _LoadPlanner(store, key_of(key), version)
    with _by_name():
        load(
            {},
            storage_reader=FileSystemReader(directory),
            planner=planner,
            process_group=process_group,
            no_dist=not dist.is_initialized(),
        )
    share, parts = planner.share, planner.parts()
    return store.run(
        lambda own: own.put_state_dict(
            parts,
            key,
            version=share.version,
            keep=keep,
            copies=copies,
            checksum=checksum,
            publisher=(share.index, share.count),
            timeout=timeout,
        )
    )


class _SavePlanner(SavePlanner):
    """Lets torch's own writer write what is in the store."""

    def __init__(self, store: BlockingStore, key: str, version: VersionSelector) -> None:
        self._store = store
        self._key = key
        self._version = version
        self._pinned: PinnedVersion | None = None
        self._objects: dict[str, Any] | None = None

    def close(self) -> None:
        """Release the version."""
        if self._pinned is not None:
            self._pinned.release()

    @property
    def pinned(self) -> PinnedVersion:
        """The version that is written; known after the local plan."""
        if self._pinned is None:
            raise ValueError("make the local plan first")
        return self._pinned

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Set up the planner; the state dict is the one in the store."""

    def create_local_plan(self) -> SavePlan:
        """Plan with the version that this rank has found; the coordinator distributes its parts."""
        self._pinned = self._pin(self._version)
        return SavePlan([], planner_data=self.pinned.version)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Distribute the newest version that any rank has found to all ranks."""
        newest = max(plan.planner_data for plan in all_plans)
        self._hold(newest)
        pinned = self.pinned
        items = [_write_item(name, properties_of(tensor), tensor.shape, box.offsets, box.shape)
                 for name, tensor in pinned.tensors().items() for box in boxes_of(tensor)]  # fmt: skip
        items += [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in pinned.objects()]
        dealt = _deal(items, [written_nbytes(item) for item in items], len(all_plans))
        plans, metadata = create_default_global_save_plan([SavePlan(mine, planner_data=newest) for mine in dealt])
        steps = {name: steps_of(path) for name, path in pinned.paths().items() if name in metadata.state_dict_metadata}
        return plans, replace(metadata, planner_data=steps)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Hold the version that all ranks write."""
        self._hold(new_plan.planner_data)
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Read the tensors to be written."""
        name, data = write_item.index.fqn, write_item.tensor_data
        if data is None:
            if self._objects is None:
                self._objects = self.pinned.objects()
            return encode(self._objects[name])
        tensor = torch.empty(data.chunk.sizes, dtype=data.properties.dtype)
        block = PinnedBlock(name, tuple(data.chunk.offsets), tensor)
        self._store.run(lambda _: self.pinned.read([block], self._store.timeout))
        return tensor

    def _hold(self, version: int) -> None:
        if self.pinned.version != version:
            self.pinned.release()
            self._pinned = self._pin(version)

    def _pin(self, version: VersionSelector) -> PinnedVersion:
        return self._store.pin(self._key, version)


class _LoadPlanner(LoadPlanner):
    """Collects what torch's own reader has read on a rank, to put it into the store.

    Attributes:
        share: What this rank puts; known after the plan is finished.
    """

    share: RankShare

    def __init__(self, store: BlockingStore, key: str, version: int | None) -> None:
        self._store = store
        self._key = key
        self._version = version
        self._metadata: Metadata | None = None
        self._chunks: dict[str, dict[tuple[int, ...], torch.Tensor]] = {}
        self._objects: dict[str, Any] = {}

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Set up the planner; the checkpoint's metadata list its content."""
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """An empty plan: the coordinator distributes the content."""
        return LoadPlan([])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Distribute the checkpoint's parts to the ranks, and reserve the version that they put."""
        items, weights = [], []
        for name, entry in self._described().state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                items.append(_read_item(name, LoadItemType.BYTE_IO, (0,), (0,)))
                weights.append(0)
                continue
            for chunk in entry.chunks:
                items.append(_read_item(name, LoadItemType.TENSOR, chunk.offsets, chunk.sizes))
                weights.append(nbytes_of(chunk.sizes, entry.properties.dtype))
        version = self._version
        if version is None:
            version = self._store.reserve(self._key)
        dealt = _deal(items, weights, len(global_plan))
        return [LoadPlan(mine, planner_data=RankShare(version, rank, len(dealt))) for rank, mine in enumerate(dealt)]

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Keep what this rank puts."""
        self.share = central_plan.planner_data
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Keep an entry that is not a tensor."""
        self._objects[read_item.dest_index.fqn] = torch.load(value, weights_only=False)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Memory for a chunk."""
        name, offset = read_item.dest_index.fqn, read_item.dest_index.offset
        tensor = torch.empty(read_item.lengths, dtype=self._tensor(name).properties.dtype)
        return self._chunks.setdefault(name, {}).setdefault(tuple(offset or ()), tensor)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Do nothing: the chunk was read in place."""

    def parts(self) -> Flattened:
        """The tensors and objects that this rank has read, as a state dict."""
        leaves: dict[str, Any] = dict(self._objects)
        for name, chunks in self._chunks.items():
            about = self._tensor(name)
            leaves[name] = part_of(name, about.properties.dtype, about.size, tuple(chunks.items()))
        steps: dict[str, Steps] = self._described().planner_data or {}
        return Flattened(leaves, paths_of(tuple(leaves), steps))

    def _described(self) -> Metadata:
        if self._metadata is None:
            raise ValueError("a planner is set up with the metadata of a checkpoint")
        return self._metadata

    def _tensor(self, name: str) -> TensorStorageMetadata:
        entry = self._described().state_dict_metadata[name]
        if not isinstance(entry, TensorStorageMetadata):
            raise TypeError(f"{name!r} is not a tensor")
        return entry


def _write_item(
    name: str, properties: TensorProperties, whole: Sequence[int], offsets: Sequence[int], shape: Sequence[int]
) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(shape))
    data = TensorWriteData(chunk, properties, torch.Size(whole))
    return WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)


def _read_item(name: str, kind: LoadItemType, offsets: Sequence[int], shape: Sequence[int]) -> ReadItem:
    index = MetadataIndex(name, offsets if kind == LoadItemType.TENSOR else None)
    zeros = torch.Size((0,) * len(shape))
    return ReadItem(kind, index, zeros, index, zeros, torch.Size(shape))


def _deal(items: Sequence[Item], weights: Sequence[int], count: int) -> list[list[Item]]:
    """Distribute items to ranks evenly by weight: the heaviest item first, each to the rank with the least weight."""
    hands: list[list[Item]] = [[] for _ in range(count)]
    load = [(0, 0)] * count  # bytes, then how many
    for at in sorted(range(len(items)), key=lambda at: -weights[at]):
        least = min(range(count), key=lambda rank: load[rank])
        hands[least].append(items[at])
        load[least] = (load[least][0] + weights[at], load[least][1] + 1)
    return hands


@contextmanager
def _by_name() -> Iterator[None]:
    """Raise the store's own error if one, of any rank, has ended a checkpoint.

    Torch's warnings that there is no process group, and that an earlier checkpoint is replaced, are hidden: both are
    intended.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
        try:
            yield
        except CheckpointException as error:
            for cause, _ in error.failures.values():
                if isinstance(cause, StoreError):
                    raise cause from error
            raise
