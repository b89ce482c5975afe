"""The reader's side of batches: many plain values are granted by one call and read by one transfer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch

from skipper.dataplane import RDMAAction, RemoteLayout
from skipper.dataplane.errors import DataplaneError
from skipper.dataplane.uncollected import uncollected
from skipper.torchstore.algebra.layout import contiguous_strides
from skipper.torchstore.algebra.manifest import Binding, Manifest, TensorItem
from skipper.torchstore.algebra.sections import Section
from skipper.torchstore.clients.catalog import place_of
from skipper.torchstore.clients.remote import RemoteStore, explain_transfer
from skipper.torchstore.clients.requests import ValueRequest, inline_value
from skipper.torchstore.errors import DTypeMismatchError, KindMismatchError, LayoutMismatchError
from skipper.torchstore.protocol.batches import BatchGrant
from skipper.torchstore.protocol.messages import Grant, Share
from skipper.torchstore.support.lru_cache import LRUCache
from skipper.torchstore.support.process import this_process
from skipper.torchstore.support.records import Cost
from skipper.torchstore.tensors.local_tensors import (
    check_destination,
    fingerprint,
    is_dtensor,
    is_plain,
    memory_of,
    same_elements,
)
from skipper.torchstore.tensors.overlap import check_distinct
from skipper.torchstore.tensors.plan import Plan, PlanCache, Seals, execute
from skipper.torchstore.tensors.values import load, new_tensor
from skipper.torchstore.tensors.written import written

_ARENAS = 256
_DESTINATIONS = "destinations of batches"

ReadOne = Callable[[str, ValueRequest, Grant], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class _Place:
    """The place and the description of one plain tensor."""

    arena: Binding
    offset: int
    manifest: str
    item: TensorItem


class BatchReader:
    """Reads batches for one process.

    ``read_one`` reads values that are more than a plain tensor for a plain tensor, or that are requested in parts.
    """

    def __init__(self, remote: RemoteStore, read_one: Callable[[Cost, float], ReadOne]) -> None:
        self._remote = remote
        self._read_one = read_one
        self._arenas: LRUCache[str, Binding] = LRUCache(_ARENAS)
        self._plans = PlanCache(keys=1)
        self._lock = Lock()
        self._seen = 0  # hash of the destinations that were filled last

    async def read(
        self, requests: Mapping[str, ValueRequest], cost: Cost, timeout: float
    ) -> tuple[dict[str, Any], int]:
        """Read plain values: all of them, or none when a key does not exist.

        Returns:
            The values by key, and the version of the first.

        Raises:
            KeyNotFoundError: A key does not exist; no tensor has been changed.
            MismatchError: A destination does not fit, or two values have the same one; no tensor has been changed.
            VolumeLostError: The volume is dead.
            StoreTimeoutError: Not done in time.
        """
        keys = tuple(requests)
        with cost.spent_on("control"):
            granted = await self._remote.acquire_values(keys, timeout)
        cost.wait_s += granted.waited_s
        try:
            values = await self._values(keys, requests, granted, cost, timeout)
        finally:
            self._remote.release_values(granted)
        return {key: values[key] for key in keys}, granted.versions[0]

    async def _values(
        self,
        keys: tuple[str, ...],
        requests: Mapping[str, ValueRequest],
        granted: BatchGrant,
        cost: Cost,
        timeout: float,
    ) -> dict[str, Any]:
        arenas = tuple(self._known(arena) for arena in granted.arenas)
        items = tuple(manifest.tensors[""] for manifest in granted.manifests)
        single: dict[str, Grant] = {keys[position]: grant for position, grant in granted.others.items()}
        inline = {keys[position]: value for position, value in granted.inline.items()}
        places: dict[str, _Place] = {}
        for position, where, kind, offset, nbytes in granted.placed:
            key = keys[position]
            request, item = requests[key], items[kind]
            if request.part is None and (request.into is None or is_plain(request.into)):
                places[key] = _Place(arenas[where], offset + item.offset, granted.manifests[kind].id, item)
            else:
                binding = arenas[where] if nbytes < 0 else Section(arenas[where], offset, nbytes)
                version = granted.versions[position]
                single[key] = _as_grant(key, version, granted.manifests[kind], binding)
        given = {key: into for key in (*inline, *single) if (into := requests[key].into) is not None}
        if given:
            others = {key: into for key in places if (into := requests[key].into) is not None}
            _check_distinct(given | others, requests, places, inline, single)
        values: dict[str, Any] = {}
        if places:
            cost.mode = "snapshot"
            values = await self._move(places, requests, granted.versions[0], cost, timeout)
        for key, value in inline.items():
            values[key] = inline_value(key, requests[key], value)
        read_one = self._read_one(cost, timeout)
        for key, grant in single.items():
            values[key] = await read_one(key, requests[key], grant)
        return values

    async def _move(
        self,
        places: Mapping[str, _Place],
        requests: Mapping[str, ValueRequest],
        version: int,
        cost: Cost,
        timeout: float,
    ) -> dict[str, Any]:
        """Read tensors and pickled objects by one transfer."""
        with cost.spent_on("describe"):
            given = {key: into for key in places if (into := requests[key].into) is not None}
            sources = tuple(f"{place.arena.id}@{place.offset}:{place.manifest}" for place in places.values())
            mark = fingerprint(given) if len(given) == len(places) else None
            plan = self._plans.find(_DESTINATIONS, mark, sources) if mark is not None else None
        targets: dict[str, torch.Tensor] = dict(given)
        if plan is None:
            cost.hit = False
            with cost.spent_on("compile"):
                _check_distinct(given, requests, places, {}, {})
                # Each has memory of its own: a view of one allocation would keep all of it alive.
                targets |= {
                    key: new_tensor(place.item.global_shape, place.item.dtype)
                    for key, place in places.items()
                    if key not in given
                }
                plan = _compile(places, given, targets)
            if mark is not None:
                # A plan keeps its destinations alive: it is kept only for destinations that are filled twice.
                seen, self._seen = self._seen, hash(mark)
                if seen == self._seen:
                    self._plans.keep(_DESTINATIONS, mark, sources, plan)
        first, *_ = places
        try:
            if plan.nbytes:
                with cost.spent_on("transfer"), written(given.values()):
                    await execute(
                        plan.action, plan.nbytes, timeout, fresh=not cost.hit, description=f"get {len(places)} values"
                    )
        except DataplaneError as error:
            self._plans.forget(_DESTINATIONS)
            with self._lock:
                self._arenas.clear()
            arenas = {place.arena.id: place.arena for place in places.values()}
            processes = self._remote.info.processes
            memory = [(arena, processes[arena.volume]) for arena in arenas.values()]
            explain_transfer(error, first, version, memory)
        cost.nbytes += plan.nbytes
        cost.segments += plan.segments
        return {
            key: load(target.numpy().tobytes()) if places[key].item.pickled else target
            for key, target in targets.items()
        }

    def _known(self, arena: Binding) -> Binding:
        """The first copy of the binding: its handle has been parsed, and its memory may be mapped."""
        with self._lock:
            return self._arenas.get(arena.id) or self._arenas.put(arena.id, arena)


@uncollected()
def _compile(
    places: Mapping[str, _Place], given: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]
) -> Plan:
    """One transfer for all of them; values that are tied on both sides are read once.

    Raises:
        KindMismatchError: A pickled object would be read into a tensor.
        MismatchError: A destination does not fit.
    """
    action = RDMAAction()
    taken: dict[tuple[Any, ...], str] = {}
    needed = 0
    for key, place in places.items():
        item, target = place.item, targets[key].detach()
        shape = tuple(target.shape)
        if key in given:
            _check(key, item, target, shape)
        if not target.nbytes:
            continue
        if taken.setdefault(same_elements(target), key) != key:  # the same memory, and the same bytes for it
            continue
        strides = tuple(stride * item.itemsize for stride in contiguous_strides(shape))
        box = RemoteLayout(offset=place.offset, shape=shape, strides=strides, itemsize=item.itemsize)
        action.read_remote(target, place.arena.buffers[0], layout=box)
        needed += target.nbytes
    return Plan(action, Seals(()), needed=needed, tensors=len(places), of_source=((needed, len(taken)),), compile_s=0.0)


def _check(key: str, item: TensorItem, target: torch.Tensor, shape: tuple[int, ...]) -> None:
    if item.pickled:
        raise KindMismatchError(key, "an object is stored there, not a tensor: get it without tensor and slice")
    if item.dtype != str(target.dtype):
        raise DTypeMismatchError(
            key, f"stored as {item.dtype}, requested as {target.dtype}; the store never converts silently"
        )
    if item.global_shape != shape:
        raise LayoutMismatchError(key, f"stored with shape {item.global_shape}, requested with {shape}")
    check_destination(target, key)


def _check_distinct(
    given: Mapping[str, torch.Tensor],
    requests: Mapping[str, ValueRequest],
    places: Mapping[str, _Place],
    inline: Mapping[str, bytes],
    single: Mapping[str, Grant],
) -> None:
    """Refuse tensors that share memory, unless the same bytes are read into them.

    Raises:
        DestinationOverlapError: See above.
    """
    names = list(given)

    def source(index: int) -> Hashable:
        key = names[index]
        into, place = given[key], places.get(key)
        part = (into.placements, into.device_mesh) if is_dtensor(into) else requests[key].part
        if place is not None:
            return place.arena.id, place.offset, part
        value = inline.get(key)
        if value is not None:
            return value, part
        return (single[key].inline or _places(single[key])), part

    check_distinct("", [(key, memory_of(into)) for key, into in given.items()], source)


def _places(grant: Grant) -> Hashable:
    """Where the parts of a tensor are: equal for entries that are stored as one. Grants of a batch list all of it."""
    return tuple(
        (share.binding.id, place_of(share.manifest, grant.item))
        for share in grant.shares
        if isinstance(share.manifest, Manifest) and isinstance(share.binding, Binding)
    )


def _as_grant(key: str, version: int, manifest: Manifest, binding: Binding) -> Grant:
    """A single grant, for a value that is read separately; its lease is that of the batch."""
    # Readers of a snapshot do not look at its writer.
    return Grant(key, version, shares=(Share(manifest, binding, 0, this_process()),))
