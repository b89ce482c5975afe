"""The publisher's side of batches: tensors of many values are laid out in one arena and written by one copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Lock
from types import MappingProxyType
from typing import Any

import torch

from skipper.dataplane import RDMAAction, RemoteLayout
from skipper.dataplane.errors import BufferDroppedError
from skipper.dataplane.uncollected import uncollected
from skipper.torchstore.algebra.layout import contiguous_strides
from skipper.torchstore.algebra.manifest import Manifest
from skipper.torchstore.algebra.sections import SECTION_ALIGNMENT
from skipper.torchstore.clients.arenas import ArenaPool, VolumeArena
from skipper.torchstore.clients.remote import RemoteStore
from skipper.torchstore.protocol.batches import BatchPublication, Columns
from skipper.torchstore.protocol.messages import Retired
from skipper.torchstore.support.lru_cache import LRUCache
from skipper.torchstore.support.process import this_process
from skipper.torchstore.support.records import Cost
from skipper.torchstore.tensors.local_tensors import fingerprint, is_plain, same_elements
from skipper.torchstore.tensors.packing import Packed, pack
from skipper.torchstore.tensors.values import dump, inline_object, inline_tensor

_ALONE_BYTES = 8 << 20  # from here on a value has an arena of its own, which its next version can take
_LEAST_BYTES = 64 << 10  # of an arena: from this size on it begins at a page
_IDLE = 4  # arenas: two alternating batches, with two each
_KINDS = 1024  # dtypes and shapes
_POOL_KEY = "a batch"


@dataclass(frozen=True, slots=True)
class Sorted:
    """The values of a batch by how they are sent.

    Attributes:
        inline: Those in the message itself.
        shared: Tensors for the arena of the batch; pickled objects are tensors of bytes.
        pickled: The keys of the pickled objects.
        alone: Those with an arena of their own: large ones, shards, and those with checksums or copies.
    """

    inline: dict[str, bytes]
    shared: dict[str, torch.Tensor]
    pickled: frozenset[str]
    alone: dict[str, Packed]


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the tensors of a batch are in an arena, computed once for tensors that come again.

    Attributes:
        mark: Their fingerprint.
        places: Of each tensor that is written, by key: offset and bytes; tied ones are written once.
    """

    mark: tuple[Any, ...]
    nbytes: int
    moved: int
    manifests: tuple[Manifest, ...]
    columns: bytes
    places: Mapping[str, int]


def sort_values(
    values: Mapping[str, Any],
    *,
    checksum: bool,
    copies: int = 1,
    places: Mapping[str, tuple[int, int]] = MappingProxyType({}),
    by_themselves: bool = False,
) -> Sorted:
    """Look at every value of a batch, before anything is sent.

    ``places`` says, for keys of which this process puts a part, which publisher out of how many it is.
    ``by_themselves``: no two values share an arena.

    Raises:
        MismatchError: One of them cannot be stored; the error names its key.
    """
    inline: dict[str, bytes] = {}
    shared: dict[str, torch.Tensor] = {}
    alone: dict[str, Packed] = {}
    pickled: set[str] = set()
    everyone_alone = checksum or copies > 1 or by_themselves
    for key, value in values.items():
        if isinstance(value, torch.Tensor):
            small = b"" if key in places else inline_tensor(value)
            tensor = value
        else:
            data = dump(value, key=key)
            small = inline_object(data)
            tensor = value if small else torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if small:
            inline[key] = small
            continue
        is_object = tensor is not value
        if key in places or everyone_alone or not is_plain(tensor) or tensor.nbytes >= _ALONE_BYTES:
            alone[key] = pack(
                key,
                "value",
                "snapshot",
                {"": tensor},
                pickled=is_object,
                checksum=checksum,
                publisher=None if is_object else places.get(key),
            )
            continue
        shared[key] = tensor
        if is_object:
            pickled.add(key)
    if len(shared) == 1:  # nothing to share with
        ((key, tensor),) = shared.items()
        alone[key] = pack(key, "value", "snapshot", {"": tensor}, pickled=key in pickled)
        shared.clear()
    return Sorted(inline, shared, frozenset(pickled), alone)


class BatchWriter:
    """Writes the batches of one process into arenas of its volume."""

    def __init__(self, remote: RemoteStore, on_retired: Callable[[Retired], None]) -> None:
        self._remote = remote
        self.arenas = ArenaPool(remote, on_retired, idle_limit=_IDLE)
        self._kinds: LRUCache[tuple[Any, ...], Manifest] = LRUCache(_KINDS)
        self._lock = Lock()
        self._layout: _Layout | None = None
        self._seen = 0  # hash of the fingerprint that was put last

    async def write(self, values: Sorted, cost: Cost, timeout: float) -> BatchPublication:
        """Copy the tensors of a batch into an arena.

        Returns:
            The publication, with the values that travel in it.

        Raises:
            VolumeFullError: They are larger than all that the volume may hold.
            VolumeLostError: The volume is dead.
            StoreTimeoutError: There was no room, or the copy was not done, in time.
        """
        me = this_process()
        if not values.shared:
            return BatchPublication(me, inline=values.inline)
        cost.mode = "snapshot"
        with cost.spent_on("describe"):
            layout = self._describe(values, cost)
        while True:
            with cost.spent_on("control"):
                arena = await self.arenas.take(_POOL_KEY, layout.nbytes, self._remote.choose_volume(), timeout)
            try:
                await self._fill(arena, layout, values.shared, cost, timeout)
                break
            except BufferDroppedError:
                self.arenas.discard(arena.binding.id)
                if not arena.used:
                    raise
        return BatchPublication(me, arena.binding, layout.manifests, layout.columns, values.inline)

    async def _fill(
        self, arena: VolumeArena, layout: _Layout, tensors: Mapping[str, torch.Tensor], cost: Cost, timeout: float
    ) -> None:
        write = arena.write if arena.mark == layout.mark else None
        fresh = write is None
        if write is None:
            cost.hit = False
            with cost.spent_on("compile"):
                write = _compile(arena, layout, tensors)
        await self.arenas.write(arena, write, layout.moved, cost, timeout, fresh=fresh)
        if self._layout is layout:
            arena.mark, arena.write = layout.mark, write

    def _describe(self, values: Sorted, cost: Cost) -> _Layout:
        mark = (values.pickled, fingerprint(values.shared))
        if self._layout is not None and self._layout.mark == mark:
            return self._layout
        cost.hit = False
        layout = self._lay_out(mark, values)
        # A compiled copy keeps its tensors alive: as for state dicts, it is kept only if they come twice.
        seen, self._seen = self._seen, hash(mark)
        self._layout = layout if seen == self._seen and not values.pickled else None
        return layout

    @uncollected()
    def _lay_out(self, mark: tuple[Any, ...], values: Sorted) -> _Layout:
        manifests: dict[str, tuple[int, Manifest]] = {}
        kinds: list[int] = []
        offsets: list[int] = []
        sizes: list[int] = []
        places: dict[str, int] = {}
        tied: dict[tuple[Any, ...], int] = {}
        end = moved = 0
        for key, tensor in values.shared.items():
            manifest = self._manifest(key, tensor, key in values.pickled)
            kind, _ = manifests.setdefault(manifest.id, (len(manifests), manifest))
            size = -(-tensor.nbytes // SECTION_ALIGNMENT) * SECTION_ALIGNMENT
            offset = tied.setdefault(same_elements(tensor), end)
            if offset == end:
                places[key] = offset
                end += size
                moved += tensor.nbytes
            kinds.append(kind)
            offsets.append(offset)
            sizes.append(size)
        columns = Columns(tuple(values.shared), tuple(kinds), tuple(offsets), tuple(sizes))
        known = tuple(manifest for _, manifest in manifests.values())
        return _Layout(mark, max(end, _LEAST_BYTES), moved, known, columns.encode(), places)

    def _manifest(self, key: str, tensor: torch.Tensor, pickled: bool) -> Manifest:
        """The layout of a plain tensor at the start of its section: equal for all of one dtype and shape."""
        kind = (tensor.dtype, tensor.shape, pickled)
        with self._lock:
            found = self._kinds.get(kind)
        if found is None:
            found = pack(key, "value", "snapshot", {"": tensor}, pickled=pickled).manifest
            with self._lock:
                self._kinds.put(kind, found)
        return found


@uncollected()
def _compile(arena: VolumeArena, layout: _Layout, tensors: Mapping[str, torch.Tensor]) -> RDMAAction:
    action, buffer = RDMAAction(), arena.binding.buffers[0]
    for key, offset in layout.places.items():
        tensor = tensors[key].detach()
        itemsize = tensor.element_size()
        strides = tuple(stride * itemsize for stride in contiguous_strides(tensor.shape))
        box = RemoteLayout(offset=offset, shape=tuple(tensor.shape), strides=strides, itemsize=itemsize)
        action.write_remote(buffer, tensor, layout=box)
    return action
