"""`StoreReader`: lets `torch.distributed.checkpoint.load` load a checkpoint from the store."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from skipper.torchstore.clients.pinning import PinnedBlock, PinnedVersion, StoredTensor
from skipper.torchstore.clients.registry import DEFAULT_STORE_NAME
from skipper.torchstore.clients.remote import DEFAULT_TIMEOUT_S
from skipper.torchstore.clients.requests import VersionSelector
from skipper.torchstore.dcp.calls import Keyed
from skipper.torchstore.dcp.records import encode, metadata_of
from skipper.torchstore.errors import KeyNotFoundError, LayoutMismatchError


@dataclass(frozen=True, slots=True, order=True)
class _Found:
    """The version that a rank holds.

    Attributes:
        version: Its number.
        lease: The lease that holds it.
        is_shared: Whether other ranks rely on the same lease.
    """

    version: int
    lease: int
    is_shared: bool = False


class StoreReader(Keyed, StorageReader):
    """Reads a checkpoint from the store: what `StoreWriter` or `torchstore.put_state_dict` has put.

    Each rank reads the blocks that its planner asks for, with their exact bytes, directly into the tensors that are
    loaded. All ranks read one version, which does not change until they have read it, even if others are saved.

    A reader holds the version from `read_metadata` until its data has been read. If ranks find different versions,
    because one was saved in between, a rank with the newest one holds it for the others until its reader is closed,
    reset or deleted. When ``load`` returns, all ranks have read. If you call the methods yourself, close the reader or
    use it as a context manager.

    The example of `StoreWriter` shows one.

    Args:
        key: The key of the checkpoint; a ``checkpoint_id`` given to ``load`` replaces it.
        store_name: Name of the store.
        version: "latest", a number, or ("newer_than", number), as in `torchstore.get_state_dict`.
        timeout: Timeout of each operation on the store, in seconds.
    """

    def __init__(
        self,
        key: str | os.PathLike[str],
        *,
        store_name: str = DEFAULT_STORE_NAME,
        version: VersionSelector = "latest",
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        super().__init__(key, store_name, timeout)
        self._version = version
        self._pinned: PinnedVersion | None = None
        self._is_shared = False  # other ranks still need the version that this one holds

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start a new read, from another key if one is given."""
        self.close()
        super().reset(checkpoint_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the version that is held, if there is one; idempotent."""
        self._is_shared = False
        pinned, self._pinned = self._pinned, None
        if pinned is not None:
            pinned.release()

    def __del__(self) -> None:
        # `torch.distributed.checkpoint.load` closes no reader: it may have failed before the read, or this rank has
        # held the version for others. A finaliser may run in any thread, so it sends nothing by itself.
        pinned = getattr(self, "_pinned", None)
        if pinned is not None:
            self._store.release_soon(pinned)

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """The metadata of the version, which is held from now on.

        Raises:
            KeyNotFoundError: There is none.
            StoreError: It cannot be read.
        """
        return metadata_of(self._pin(self._version))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **options: Any) -> None:
        """Do nothing: `read_metadata` has done all of it."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add the version for which this rank has planned to the plan."""
        held = self._held()
        return replace(plan, storage_data=_Found(held.version, held.lease))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Make all ranks read the same version, the newest that one of them has found."""
        newest: _Found = max(plan.storage_data for plan in plans)
        if all(plan.storage_data.version == newest.version for plan in plans):
            return plans
        return [replace(plan, storage_data=replace(newest, is_shared=True)) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan says, all tensors in one batch.

        Raises:
            KeyNotFoundError: An entry is not in the version that all ranks read.
            LayoutMismatchError: A destination has another shape than the entry that is read into it.
            VolumeLostError: The bytes are gone.
            StoreTimeoutError: They did not come in time.
        """
        try:
            self._read(self._agreed(plan.storage_data), plan, planner)
        finally:
            if not self._is_shared:
                self.close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, pinned: PinnedVersion, plan: LoadPlan, planner: LoadPlanner) -> None:
        stored, objects = pinned.tensors(), pinned.objects()
        blocks: list[PinnedBlock] = []
        filled: list[tuple[ReadItem, torch.Tensor, torch.Tensor]] = []
        for item in plan.items:
            name = item.storage_index.fqn
            if name not in (objects if item.type == LoadItemType.BYTE_IO else stored):
                raise KeyNotFoundError(f"{self.key}/{name}")
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, encode(objects[name]))
                continue
            target = planner.resolve_tensor(item).detach()
            if target.shape != item.lengths:
                raise LayoutMismatchError(
                    f"{self.key}/{name}", f"{tuple(item.lengths)} is read into a tensor of shape {tuple(target.shape)}"
                )
            into = _destination(stored[name], target)
            start = item.storage_index.offset or (0,) * target.ndim
            offsets = tuple(at + more for at, more in zip(start, item.storage_offsets, strict=True))
            blocks.append(PinnedBlock(name, offsets, into))
            filled.append((item, target, into))
        self._store.run(lambda _: pinned.read(blocks, self._store.timeout))
        for item, target, into in filled:
            if into is not target:
                target.copy_(into)
            planner.commit_tensor(item, target)

    def _pin(self, version: VersionSelector) -> PinnedVersion:
        self.close()
        self._pinned = self._store.pin(self.key, version)
        return self._pinned

    def _agreed(self, found: _Found) -> PinnedVersion:
        """The version that all ranks read."""
        held = self._held()
        self._is_shared = found.is_shared and found.lease == held.lease
        if held.version == found.version:
            return held
        self._pinned = self._store.pin(self.key, found.version, beside=found.lease)
        held.release()
        return self._pinned

    def _held(self) -> PinnedVersion:
        if self._pinned is None:
            raise ValueError(
                "call read_metadata before making a plan: pass the StoreReader to torch.distributed.checkpoint.load"
            )
        return self._pinned


def _destination(stored: StoredTensor, target: torch.Tensor) -> torch.Tensor:
    """The target, or memory in the stored dtype if torch must convert; quantized values are converted by the store."""
    if stored.dtype == target.dtype or stored.is_quantized:
        return target
    return torch.empty(target.shape, dtype=stored.dtype, device=target.device)
