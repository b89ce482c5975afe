"""The records that a reader has: manifests and bindings by id, so that they are sent to it only once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from math import prod
from threading import Lock
from typing import TypeVar

from skipper.torchstore.algebra.layout import contiguous_strides
from skipper.torchstore.algebra.manifest import Binding, Manifest, TensorItem
from skipper.torchstore.protocol.messages import Grant, Share
from skipper.torchstore.support.lru_cache import LRUCache
from skipper.torchstore.support.process import ProcessId
from skipper.torchstore.tensors.plan import Source

R = TypeVar("R", Manifest, Binding)

Choose = Callable[[Sequence[Binding]], Binding]
"""Chooses one of several bindings that hold the same bytes."""

_KEYS = 256
_RECORDS_PER_KEY = 64  # of one key: every publisher's manifest and its few bindings


class StoredTensors:
    """The descriptions of a version's tensors by its publishers, merged at the first use.

    Versions of the same layouts share it: a warm read does not go through the records of hundreds of publishers.
    """

    def __init__(self, manifests: Sequence[Manifest]) -> None:
        self.ids = tuple(manifest.id for manifest in manifests)
        self._manifests = manifests

    @cached_property
    def by_name(self) -> Mapping[str, TensorItem]:
        """The tensors by name, each as its first publisher describes it."""
        found: dict[str, TensorItem] = {}
        for manifest in self._manifests:
            for name, item in manifest.tensors.items():
                found.setdefault(name, item)
        return found


@dataclass(frozen=True, slots=True)
class Opened:
    """A grant whose ids have been replaced by the records that they name.

    Attributes:
        generations: For each source, the value that its seal must have (direct mode).
        writers: For each source, its publisher.
        stored: The tensors of all sources.
        peer_copy: Another reader's copy to read from, if there is one.
    """

    grant: Grant
    sources: tuple[Source, ...]
    generations: tuple[int, ...]
    writers: tuple[ProcessId, ...]
    stored: StoredTensors
    peer_copy: Opened | None = None

    @property
    def ids(self) -> tuple[str, ...]:
        """Names layouts and memory of all sources: equal ids, equal plan."""
        return tuple(source.id for source in self.sources)

    @property
    def kind(self) -> str:
        """The kind of the value: "value" or "state_dict"."""
        return self.sources[0].manifest.kind

    @property
    def mode(self) -> str:
        """Where the bytes are: "direct" or "snapshot"."""
        return next((source.binding.mode for source in self.sources if source.binding), "snapshot")

    def tensors(self) -> Mapping[str, TensorItem]:
        """The tensors by name, each as its first source describes it."""
        return self.stored.by_name

    def places(self, name: str) -> tuple[tuple[object, ...] | None, ...]:
        """Where each source holds a tensor; equal for names that are tied in all of them."""
        return tuple(place_of(source.manifest, name) for source in self.sources)


@dataclass(frozen=True, slots=True)
class Recalled:
    """The records of a key when its reader asked: the answer may refer to each of them by id."""

    key: str
    records: dict[str, Manifest | Binding]

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of records that the controller need not send again."""
        return tuple(self.records)


def place_of(manifest: Manifest, name: str) -> tuple[object, ...] | None:
    """The place of a publisher's part of a tensor in its buffers; equal for tensors with the same bytes."""
    item = manifest.tensors.get(name)
    if item is None or not item.pieces:
        return None
    nbytes = prod(item.global_shape) * item.itemsize
    dense = tuple(stride * item.itemsize for stride in contiguous_strides(item.global_shape))
    if item.pieces[0].box.shape == item.global_shape and item.strides == dense:  # the same bytes in any shape
        return item.buffer, item.offset, nbytes
    return item.buffer, item.offset, item.strides, item.pieces, item.dtype


class Catalog:
    """The records of one client, by key; bounded in both directions. Thread-safe."""

    def __init__(self) -> None:
        self._records: LRUCache[str, dict[str, Manifest | Binding]] = LRUCache(_KEYS)
        self._stored: LRUCache[str, StoredTensors] = LRUCache(_KEYS)
        self._lock = Lock()

    def recall(self, key: str) -> Recalled:
        """The records of a key now."""
        with self._lock:
            return Recalled(key, dict(self._records.get(key) or {}))

    def open(self, recalled: Recalled, grant: Grant, choose: Choose) -> Opened:
        """Resolve a grant's ids, and remember the records that came with it."""
        records = recalled.records
        sources: list[Source] = []
        used: dict[str, Manifest | Binding] = {}
        of_peer = (grant.peer_copy,) if grant.peer_copy is not None else ()
        for share in (*grant.shares, *of_peer):
            manifest = _resolve(records, share.manifest, Manifest)
            holders = _holders(records, share)
            sources.append(Source(manifest, choose(holders) if holders else None))
            used.update({record.id: record for record in (manifest, *holders)})
        with self._lock:
            # The records of this version first, then those of the versions before, as many as have room.
            room = max(_RECORDS_PER_KEY, 2 * len(used))
            self._records.put(recalled.key, dict(islice((used | records).items(), room)))
        peer_copy: Opened | None = None
        if grant.peer_copy is not None:
            peer, share = sources.pop(), grant.peer_copy
            stored = StoredTensors([peer.manifest])
            peer_copy = Opened(grant, (peer,), (share.generation,), (share.writer,), stored)
        return Opened(
            grant,
            tuple(sources),
            tuple(share.generation for share in grant.shares),
            tuple(share.writer for share in grant.shares),
            self._together(recalled.key, [source.manifest for source in sources]),
            peer_copy,
        )

    def _together(self, key: str, manifests: Sequence[Manifest]) -> StoredTensors:
        new = StoredTensors(manifests)
        with self._lock:
            known = self._stored.get(key)
            return known if known is not None and known.ids == new.ids else self._stored.put(key, new)

    @staticmethod
    def volumes(recalled: Recalled, grant: Grant) -> list[tuple[str, ...]]:
        """For each part of a granted version, the volumes that hold a copy of it."""
        return [tuple(holder.volume for holder in _holders(recalled.records, share)) for share in grant.shares]

    def forget(self, keys: Iterable[str]) -> None:
        """Drop the records of some keys."""
        with self._lock:
            for key in keys:
                self._records.pop(key)
                self._stored.pop(key)


def _holders(records: dict[str, Manifest | Binding], share: Share) -> list[Binding]:
    """All memory that holds a part."""
    return [_resolve(records, holder, Binding) for holder in (share.binding, *share.copies) if holder is not None]


def _resolve(records: dict[str, Manifest | Binding], given: R | str, kind: type[R]) -> R:
    """The record of an id, or the record itself."""
    record = records[given] if isinstance(given, str) else given
    if not isinstance(record, kind):
        raise LookupError(f"{given} names a record of another kind")
    return record
