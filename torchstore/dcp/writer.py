"""`StoreWriter`: lets `torch.distributed.checkpoint.save` save a checkpoint into the store."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from skipper.torchstore.algebra.copies import check_copies
from skipper.torchstore.clients.registry import DEFAULT_STORE_NAME
from skipper.torchstore.clients.remote import DEFAULT_TIMEOUT_S
from skipper.torchstore.clients.requests import check_keep
from skipper.torchstore.dcp.calls import Keyed
from skipper.torchstore.dcp.records import EncodedObject, Stored, part_of, paths_of, written_nbytes
from skipper.torchstore.tensors.state_dict import Flattened


@dataclass(frozen=True, slots=True)
class RankShare:
    """One rank's part in a save: the version that all ranks put, the index of the part, and the number of parts."""

    version: int
    index: int
    count: int


class StoreWriter(Keyed, StorageWriter):
    """Writes a checkpoint into the store, as one version of one key.

    Every rank writes what the planner has assigned to it; the version appears, complete, when the last rank has
    written. `StoreReader` loads it, and `torchstore.get_state_dict` reads it like a version of `put_state_dict`. A save
    that fails does not change earlier versions.

    Args:
        key: The key to save under; a ``checkpoint_id`` given to ``save`` replaces it.
        store_name: Name of the store.
        version: Its number, higher than those before; None: the next one.
        keep: How many versions of this key stay readable, as in `torchstore.put_state_dict`.
        copies: In how many volumes each part is stored, as in `torchstore.put_state_dict`.
        checksum: Whether readers verify checksums, as in `torchstore.put_state_dict`.
        timeout: Timeout of each operation on the store, in seconds.

    Raises:
        TypeError: An argument has another type.
        ValueError: An argument is out of its range.

    Example:
        ```python
        import warnings

        import torch
        import torch.distributed.checkpoint as dcp

        from skipper.torchstore import sync as ts
        from skipper.torchstore.dcp import StoreReader, StoreWriter

        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # there is one rank
        ts.initialize()
        state = {"w": torch.arange(4.0), "step": 7}
        dcp.save(state, storage_writer=StoreWriter("run"))
        into = {"w": torch.zeros(4), "step": 0}
        dcp.load(into, storage_reader=StoreReader("run"))
        print(into["w"].tolist(), into["step"])  # [0.0, 1.0, 2.0, 3.0] 7
        ts.shutdown()
        ```
    """

    def __init__(
        self,
        key: str | os.PathLike[str],
        *,
        store_name: str = DEFAULT_STORE_NAME,
        version: int | None = None,
        keep: int | None = None,
        copies: int | None = None,
        checksum: bool | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        super().__init__(key, store_name, timeout)
        if keep is not None:
            check_keep(keep)
        if copies is not None:
            check_copies(copies)
        self._version = version
        self._keep = keep
        self._copies = copies
        self._checksum = checksum

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Check that the save can be one version.

        Raises:
            ValueError: The ranks would save without collectives, each for itself.
        """
        if not kwargs.get("use_collectives", True):
            raise ValueError("a checkpoint in the store is one version of all ranks: save with use_collectives=True")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged.

        Raises:
            ValueError: It is the plan of an earlier save, and would be written under the version of that save.
        """
        if self._version is None and not getattr(plan, "usable", True):
            raise ValueError(
                "a planner with enable_plan_caching=True repeats the plan of an earlier save: give "
                "StoreWriter(version=...), or do not cache plans"
            )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Add to the plan of every rank which version this is, and which part of it the rank writes."""
        version = self._store.reserve(self.key) if self._version is None else self._version
        return [replace(plan, storage_data=RankShare(version, index, len(plans))) for index, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Put this rank's part."""
        share: RankShare = plan.storage_data
        version = share.version if self._version is None else self._version
        parts = _collect(plan.items, planner)
        self._store.run(
            lambda own: own.put_state_dict(
                parts,
                self.key,
                version=version,
                keep=self._keep,
                copies=self._copies,
                checksum=self._checksum,
                publisher=(share.index, share.count),
                timeout=self._store.timeout,
            )
        )
        written: Future[list[WriteResult]] = Future()
        where = Stored(self.key, version)
        written.set_result([WriteResult(item.index, written_nbytes(item), where) for item in plan.items])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Add the version to the metadata: every rank has put its part."""
        metadata.storage_data = next((result.storage_data for rank in results for result in rank), None)
        metadata.storage_meta = self.storage_meta()

    def storage_meta(self) -> StorageMeta:
        """The key."""
        return StorageMeta(checkpoint_id=self.key)


def _collect(items: Sequence[WriteItem], planner: SavePlanner) -> Flattened:
    """The items that a planner writes, as a state dict."""
    objects: dict[str, Any] = {}
    chunks: dict[str, list[tuple[Sequence[int], torch.Tensor]]] = {}
    data = {item.index.fqn: item.tensor_data for item in items}
    for item in items:
        name = item.index.fqn
        if item.type == WriteItemType.BYTE_IO:
            objects[name] = _object(item, planner)
            continue
        tensor = planner.resolve_data(item)
        if not isinstance(tensor, torch.Tensor) or item.tensor_data is None:
            raise TypeError(f"{type(planner).__name__} resolves the tensor {name!r} to a {type(tensor).__name__}")
        chunks.setdefault(name, []).append((item.tensor_data.chunk.offsets, tensor))
    leaves: dict[str, Any] = dict(objects)
    for name, held in chunks.items():
        about = data[name]
        if about is not None:
            leaves[name] = part_of(name, held[0][1].dtype, about.size, held)
    return Flattened(leaves, paths_of(tuple(leaves), getattr(planner, "mappings", None)))


def _object(item: WriteItem, planner: SavePlanner) -> Any:
    """An entry that is not a tensor: itself, or the bytes of a planner with its own encoding."""
    if (
        isinstance(planner, DefaultSavePlanner)
        and type(planner).transform_object is DefaultSavePlanner.transform_object
        and type(planner).resolve_data is DefaultSavePlanner.resolve_data
    ):
        return planner.lookup_object(item.index)
    stream = planner.resolve_data(item)
    if not isinstance(stream, io.BytesIO):
        raise TypeError(f"{type(planner).__name__} resolves {item.index.fqn!r} to a {type(stream).__name__}, not bytes")
    return EncodedObject(stream.getvalue())
