"""The reader's side: ask once for a version, find or build the plan, run it, give the lease back.

Reading one version costs two control messages (ask, and a give-back that nobody waits for), however many
tensors it has. A warm read replays the plan of the last one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dataplane.errors import DataplaneError
from torchstore.catalog import Catalog, Opened, Recalled
from torchstore.errors import (
    DTypeMismatchError,
    KindMismatchError,
    LayoutMismatchError,
    SourceChangedError,
    StateDictMismatchError,
    StoreTimeoutError,
)
from torchstore.explanation import Explanation, explain_plan
from torchstore.manifest import Binding, Grant, Selector, TensorItem, Wanted
from torchstore.plan import Plan, PlanCache, compile_read, execute
from torchstore.process import ProcessId, this_process
from torchstore.records import Cost, SyncRecord
from torchstore.remote import Remote, explain_transfer
from torchstore.slices import TensorSlice
from torchstore.state_dict import flatten, unflatten
from torchstore.tensors import LocalTensor, check_destination, describe, describe_slice, fingerprint
from torchstore.values import dtype_named, load, open_inline, part_of

_TELLING_BYTES = 1 << 20  # a smaller read says more about its messages than about the memory


@dataclass(frozen=True, slots=True)
class Request:
    """What is wanted of one key: all of it or a part, and the tensor to put it into."""

    into: torch.Tensor | None = None
    part: TensorSlice | None = None


@dataclass(frozen=True, slots=True)
class _Destination:
    """A state dict that is to be filled.

    Attributes:
        given: As the caller gave it; None: everything is to be new.
        leaves: Its entries by name.
        strict: Whether names must be the same on both sides.
        mark: The fingerprint under which plans for it are kept.
    """

    given: Mapping[Any, Any] | None
    leaves: Mapping[str, Any]
    strict: bool
    mark: tuple[Any, ...]

    @staticmethod
    def of(given: Mapping[Any, Any] | None, *, strict: bool) -> _Destination:
        leaves = flatten(given)[0] if given is not None else {}
        return _Destination(given, leaves, strict, (strict, fingerprint(leaves)))


class Fetcher:
    """Reads values for one process from one store; keeps the plans."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._plans = PlanCache()
        self._catalog = Catalog()
        self._last_rate = 0.0  # bytes per second of the last large read

    async def get_values(
        self, requests: Mapping[str, Request], timeout: float
    ) -> tuple[dict[str, Any], SyncRecord | None]:
        """Read plain values: all of them, or none when a key does not exist.

        Returns:
            The values by key, and what it cost (None when nothing was asked for).
        """
        if not requests:
            return {}, None
        cost = Cost("get", time.perf_counter())
        asked = [self._catalog.recall(key) for key in requests]
        grants = await self._acquire(asked, Selector(), cost, timeout)
        try:
            values = {
                recalled.key: await self._value(recalled, requests[recalled.key], grant, cost, timeout)
                for recalled, grant in zip(asked, grants, strict=True)
            }
        finally:
            self._remote.release(grants)
        return values, cost.record(grants[0].key, grants[0].version, self._remote.take_calls())

    async def get_state_dict(
        self, key: str, into: Mapping[Any, Any] | None, selector: Selector, *, strict: bool, timeout: float
    ) -> tuple[dict[Any, Any], SyncRecord]:
        """Read one version of a state dict, into the given tensors where there are some.

        A version that its publisher takes back meanwhile is given up for the next one, unless an exact
        version was asked for.
        """
        cost = Cost("get", time.perf_counter())
        destination = _Destination.of(into, strict=strict)
        changed: SourceChangedError | None = None
        while True:
            left = max(timeout - (time.perf_counter() - cost.begin), 0.0)
            recalled = self._catalog.recall(key)
            try:
                (grant,) = grants = await self._acquire([recalled], selector, cost, left)
            except StoreTimeoutError:
                if changed is not None:
                    raise changed from None  # the next version did not come either
                raise
            try:
                state = await self._state_dict(recalled, destination, grant, cost, left)
            except SourceChangedError as error:
                if selector.exact is not None:
                    raise
                changed, selector = error, Selector(newer_than=grant.version)
                continue
            finally:
                self._remote.release(grants)
            return state, cost.record(key, grant.version, self._remote.take_calls())

    async def explain(
        self, key: str, into: Mapping[Any, Any] | None, selector: Selector, *, strict: bool, timeout: float
    ) -> Explanation:
        """The plan of a `get_state_dict` with the same arguments, in figures; it is kept for that read."""
        cost = Cost("explain", time.perf_counter())
        destination = _Destination.of(into, strict=strict)
        recalled = self._catalog.recall(key)
        grants = await self._acquire([recalled], selector, cost, timeout)
        try:
            opened = self._open_state_dict(recalled, grants[0])
            plan, _ = self._plan(key, destination, opened, cost)
            return explain_plan(key, opened, plan, known=cost.hit, last_rate=self._last_rate)
        finally:
            self._remote.release(grants)

    def forget(self, keys: tuple[str, ...]) -> None:
        """The keys were deleted: drop what is kept for them."""
        self._catalog.forget(keys)
        for key in keys:
            self._plans.forget(key)

    # Steps ----------------------------------------------------------------------------------------------

    async def _acquire(
        self, asked: list[Recalled], selector: Selector, cost: Cost, timeout: float
    ) -> tuple[Grant, ...]:
        with cost.spent_on("control"):
            if len(asked) == 1:
                return (await self._remote.acquire(asked[0].key, selector, asked[0].ids, timeout),)
            wanted = tuple(Wanted(recalled.key, selector, recalled.ids) for recalled in asked)
            return await self._remote.acquire_batch(wanted, timeout)

    async def _value(self, recalled: Recalled, request: Request, grant: Grant, cost: Cost, timeout: float) -> Any:
        key = recalled.key
        if grant.inline:
            inline = open_inline(grant.inline)
            if inline.dtype:
                return _small_tensor(key, request, inline.tensor())
            return _object(key, request, load(inline.data))
        opened = self._catalog.open(recalled, grant)
        cost.mode = opened.mode
        item = opened.tensors().get(grant.item)
        if item is None:
            objects = _objects(opened)
            if grant.item in objects:
                return _object(key, request, objects[grant.item])
            raise KindMismatchError(key, "a state dict is stored there: use get_state_dict")
        if item.pickled:
            data = torch.empty(item.global_shape, dtype=torch.uint8)
            await self._read_one(key, opened, describe(data, key=key), cost, timeout)
            return _object(key, request, load(data.numpy().tobytes()))
        target, result = _target(key, request, item)
        await self._read_one(key, opened, target, cost, timeout)
        return result

    async def _read_one(self, key: str, opened: Opened, target: LocalTensor, cost: Cost, timeout: float) -> None:
        # One tensor's plan is built faster than anything that it moves; keeping it would keep the tensor.
        cost.hit = False
        with cost.spent_on("compile"):
            name = opened.grant.item
            plan = compile_read(opened.grant.key, opened.sources, {name: target}, reader=this_process().pid)
        await self._run(key, opened, plan, cost, timeout)

    async def _state_dict(
        self, recalled: Recalled, destination: _Destination, grant: Grant, cost: Cost, timeout: float
    ) -> dict[Any, Any]:
        key = recalled.key
        opened = self._open_state_dict(recalled, grant)
        cost.mode = opened.mode
        plan, created = self._plan(key, destination, opened, cost)
        await self._run(key, opened, plan, cost, timeout)
        return _rebuild(destination, created, opened)

    def _open_state_dict(self, recalled: Recalled, grant: Grant) -> Opened:
        opened = self._catalog.open(recalled, grant) if grant.shares else None
        if opened is None or opened.kind != "state_dict" or grant.item:
            raise KindMismatchError(recalled.key, "a single value is stored there: use get")
        return opened

    def _plan(
        self, key: str, destination: _Destination, opened: Opened, cost: Cost
    ) -> tuple[Plan, dict[str, torch.Tensor]]:
        """The plan of a read, and the tensors that had to be created because none were given for them."""
        plan = self._plans.find(key, destination.mark, opened.ids)
        created: dict[str, torch.Tensor] = {}
        if plan is None:
            cost.hit = False
            with cost.spent_on("compile"):
                plan, created = _compile_state_dict(key, destination, opened)
            if not created:
                self._plans.keep(key, destination.mark, opened.ids, plan)
        return plan, created

    async def _run(self, key: str, opened: Opened, plan: Plan, cost: Cost, timeout: float) -> None:
        """Move the bytes; in direct mode make sure that they were one version's, before and after."""
        try:
            with cost.spent_on("transfer"):
                await self._check_seals(key, opened, plan, timeout)
                if plan.transfers:
                    await execute(plan.action, plan.nbytes, timeout, fresh=not cost.hit)
                await self._check_seals(key, opened, plan, timeout)
        except DataplaneError as error:
            self._plans.forget(key)
            explain_transfer(error, key, opened.grant.version, self._memory(opened))
        cost.nbytes += plan.nbytes
        cost.segments += plan.segments
        if cost.hit and plan.nbytes >= _TELLING_BYTES:
            self._last_rate = plan.nbytes / cost.transfer_s

    async def _check_seals(self, key: str, opened: Opened, plan: Plan, timeout: float) -> None:
        for index, generation in (await plan.seals.read(timeout)).items():
            if generation != opened.generations[index]:
                state = f"published generation {generation}" if generation else "is changing it"
                raise SourceChangedError(
                    key,
                    opened.grant.version,
                    f"{opened.writers[index]} {state}, granted was generation {opened.generations[index]}",
                )

    def _memory(self, opened: Opened) -> list[tuple[Binding, ProcessId]]:
        """Each source's memory, with the process that it lives and dies with."""
        volumes = self._remote.info.processes
        return [
            (source.binding, writer if source.binding.mode == "direct" else volumes[source.binding.volume])
            for source, writer in zip(opened.sources, opened.writers, strict=True)
            if source.binding is not None
        ]


def _compile_state_dict(key: str, destination: _Destination, opened: Opened) -> tuple[Plan, dict[str, torch.Tensor]]:
    """The plan of a state dict, and the tensors that had to be created because none were given for them."""
    stored, leaves = opened.tensors(), destination.leaves
    objects = {name for source in opened.sources for name in source.manifest.objects}
    if destination.given is not None and destination.strict:
        missing = tuple(name for name in leaves if name not in stored and name not in objects)
        unexpected = tuple(name for name in (*stored, *sorted(objects)) if name not in leaves)
        if missing or unexpected:
            raise StateDictMismatchError(key, missing, unexpected)
    for name in objects:
        if isinstance(leaves.get(name), torch.Tensor):
            raise KindMismatchError(f"{key}/{name}", "an object is stored there, a tensor was given")
    created: dict[str, torch.Tensor] = {}
    targets: dict[str, LocalTensor] = {}
    for name, item in stored.items():
        tensor = leaves.get(name)
        if not isinstance(tensor, torch.Tensor):
            tensor = created[name] = torch.empty(item.global_shape, dtype=dtype_named(item.dtype))
        targets[name] = describe(tensor, key=f"{key}/{name}")
    return compile_read(key, opened.sources, targets, reader=this_process().pid), created


def _rebuild(destination: _Destination, created: Mapping[str, Any], opened: Opened) -> dict[Any, Any]:
    """The state dict as it was put, with the reader's own tensors in it."""
    given, leaves, objects = destination.given, destination.leaves, _objects(opened)
    stored = opened.tensors()
    if isinstance(given, dict) and not objects and not created and len(leaves) == len(stored):
        return given  # everything went into the given tensors: the given dict is the answer
    values = {name: created.get(name, leaves.get(name)) for name in stored} | objects
    paths = {name: path for source in opened.sources for name, path in source.manifest.paths.items()}
    return unflatten({name: values[name] for name in paths if name in values}, paths)


def _objects(opened: Opened) -> dict[str, Any]:
    """The entries that are not tensors; of several publishers the first one's."""
    merged: dict[str, Any] = {}
    for share in reversed(opened.grant.shares):
        if share.objects:
            merged.update(load(share.objects))
    return merged


def _object(key: str, request: Request, value: Any) -> Any:
    if request.into is not None or request.part is not None:
        raise KindMismatchError(key, "an object is stored there, not a tensor: ask without tensor and slice")
    return value


def _target(key: str, request: Request, item: TensorItem) -> tuple[LocalTensor, torch.Tensor]:
    """Where a stored tensor goes, and what the caller gets back."""
    if request.part is not None:
        into = request.into
        if into is None:
            into = torch.empty(request.part.local_shape, dtype=dtype_named(item.dtype))
        return describe_slice(into, request.part, key=key), into
    if request.into is not None:
        return describe(request.into, key=key), request.into
    created = torch.empty(item.global_shape, dtype=dtype_named(item.dtype))
    return describe(created, key=key), created


def _small_tensor(key: str, request: Request, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that came in the message, cut and copied as asked for."""
    if request.into is None:
        return tensor if request.part is None else part_of(tensor, request.part, key=key).clone()
    if request.part is not None:
        target = describe_slice(request.into, request.part, key=key)
    else:
        target = describe(request.into, key=key)
    check_destination(target.tensor, key)
    if target.tensor.dtype != tensor.dtype:
        raise DTypeMismatchError(key, f"stored as {tensor.dtype}, asked for as {target.tensor.dtype}")
    if target.global_shape != tuple(tensor.shape):
        raise LayoutMismatchError(key, f"stored with shape {tuple(tensor.shape)}, asked for with {target.global_shape}")
    for piece in target.pieces:
        here = _region(piece.local, piece.box.shape)
        target.tensor[here].copy_(tensor[_region(piece.box.offsets, piece.box.shape)])
    return request.into


def _region(offsets: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(offsets, shape, strict=True))
