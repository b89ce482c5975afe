"""The reader's side: ask once for a version, find or build the plan, run it, return the lease.

Reading one version costs two control messages (a request, and the return of the lease, which is not awaited), for any
number of tensors. A warm read replays the plan of the last one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch

from skipper.control.model.bounds import check_seconds
from skipper.dataplane import RDMAAction
from skipper.dataplane.errors import DataplaneError
from skipper.torchstore.clients.batch_get import BatchReader, ReadOne
from skipper.torchstore.clients.catalog import Catalog, Choose, Opened, Recalled
from skipper.torchstore.clients.delta_read import DeltaRead, DestinationContents, compile_delta
from skipper.torchstore.clients.destination import (
    Destination,
    compile_copy,
    compile_state_dict,
    compile_targets,
    into_entries,
    objects_of,
    rebuild,
)
from skipper.torchstore.clients.explanation import Explanation, explain_plan
from skipper.torchstore.clients.peer_source import PeerSource
from skipper.torchstore.clients.pinning import PinnedVersion
from skipper.torchstore.clients.remote import RemoteStore
from skipper.torchstore.clients.requests import (
    StateDictGet,
    ValueRequest,
    as_object,
    inline_value,
    selector_of,
    target_of,
)
from skipper.torchstore.clients.transfer import Failover, Mover
from skipper.torchstore.errors import KindMismatchError, SourceChangedError, StoreError, StoreTimeoutError
from skipper.torchstore.peers.shm_value_board import BoardReader
from skipper.torchstore.protocol.messages import NEWEST, Grant, Selector, Share, Wanted
from skipper.torchstore.support.lru_cache import LRUCache
from skipper.torchstore.support.records import Cost, SyncRecord
from skipper.torchstore.tensors.local_tensors import LocalTensor, describe
from skipper.torchstore.tensors.plan import Plan, PlanCache
from skipper.torchstore.tensors.values import load
from skipper.torchstore.tensors.written import written

T = TypeVar("T")

_CONTENTS = 32  # keys
_PATIENCE = 0.25  # of the timeout: the share for waiting for another reader's copy, and for reading it
_LEAST_S = 0.05  # enough for a version that exists already


@dataclass(frozen=True, slots=True)
class _Filled:
    """A state dict that has been read.

    Attributes:
        state: The state dict to return.
        can_be_offered: Whether all of it is in tensors of the caller, so that others may read it there.
        failed: Whether reading another reader's copy failed.
    """

    state: dict[Any, Any]
    can_be_offered: bool
    failed: bool


@dataclass(frozen=True, slots=True)
class _Read:
    """A read of a granted version, until ``end`` by `time.perf_counter`."""

    recalled: Recalled
    grant: Grant
    cost: Cost
    end: float


class Fetcher:
    """Reads values for one process from one store; keeps the plans."""

    def __init__(self, remote: RemoteStore) -> None:
        self._remote = remote
        self._plans = PlanCache()
        self._catalog = Catalog()
        self._peer_source = PeerSource()
        self._contents: LRUCache[str, DestinationContents] = LRUCache(_CONTENTS)  # by key, for deltas
        self._mover = Mover(remote, self._plans)
        self._failover = Failover(remote)
        self._batches = BatchReader(remote, self._read_single)
        self._board = BoardReader() if remote.info.controller.is_local else None

    async def get_values(
        self, requests: Mapping[str, ValueRequest], timeout: float
    ) -> tuple[dict[str, Any], SyncRecord | None]:
        """Read plain values: all of them, or none when a key does not exist.

        Returns:
            The values by key, and what it cost (None when nothing was asked for).
        """
        if not requests:
            return {}, None
        cost = Cost("get", time.perf_counter())
        if len(requests) == 1:
            ((key, request),) = requests.items()
            posted = await self._posted(key, cost, timeout)
            if posted is not None:
                version, value = posted
                return {key: inline_value(key, request, value)}, cost.record(key, version, self._remote.take_calls())
        else:
            values, version = await self._batches.read(requests, cost, timeout)
            return values, cost.record(next(iter(requests)), version, self._remote.take_calls())
        recalled, end = self._catalog.recall(key), cost.begin + check_seconds("timeout", timeout)
        (grant,) = grants = await self._acquire([recalled], NEWEST, cost, timeout)
        try:
            values = {key: await self._value(_Read(recalled, grant, cost, end), request)}
        finally:
            self._remote.release(grants)
        return values, cost.record(grant.key, grant.version, self._remote.take_calls())

    async def get_state_dict(self, get: StateDictGet) -> tuple[dict[Any, Any], SyncRecord]:
        """Read one version of a state dict, into the given tensors if there are any.

        If its publisher withdraws the version during the read, the next one is read, unless an exact version was
        requested.
        """
        cost, key, selector = Cost("get", time.perf_counter()), get.key, selector_of(get.version)
        end = cost.begin + check_seconds("timeout", get.timeout)
        with cost.spent_on("describe"):
            destination = Destination.of(get)
            read_group = self._peer_source.read_group(key, destination) if get.serve else ""
        changed: SourceChangedError | None = None
        while True:
            recalled = self._catalog.recall(key)
            try:
                (grant,) = grants = await self._acquire([recalled], selector, cost, _left(end), read_group)
            except StoreTimeoutError:
                if changed is not None:
                    raise changed from None  # the next version did not come either
                raise
            if self._peer_source.withdraw(key) and not read_group:
                self._remote.withdraw(key)
            try:
                filled = await self._state_dict(_Read(recalled, grant, cost, end), destination)
                if read_group:
                    self._finish(key, destination, grant, filled)
                    grants = grant.singles
            except SourceChangedError as error:
                if selector.exact is not None:
                    raise
                changed, selector = error, Selector(newer_than=grant.version)
                continue
            finally:
                self._remote.release(grants)
            return filled.state, cost.record(key, grant.version, self._remote.take_calls())

    async def pin(self, key: str, selector: Selector, timeout: float) -> PinnedVersion:
        """Hold a version of a state dict; see `PinnedVersion`."""
        mover = Mover(self._remote, self._plans)
        return await PinnedVersion.of(
            key, selector, self._remote, self._catalog, mover, self._failover, self._plans, timeout
        )

    async def with_pinned(
        self, key: str, selector: Selector, use: Callable[[PinnedVersion], Awaitable[None]], timeout: float
    ) -> tuple[int, SyncRecord]:
        """Hold a version while it is used. Returns its number, and the cost of all its reads."""
        pinned = await self.pin(key, selector, timeout)
        try:
            await use(pinned)
        finally:
            pinned.release()
        return pinned.version, pinned.cost.record(key, pinned.version, self._remote.take_calls())

    async def explain(self, get: StateDictGet) -> Explanation:
        """The plan of a `get_state_dict` with the same arguments, in figures; it is kept for that read."""
        cost, key = Cost("explain", time.perf_counter()), get.key
        destination = Destination.of(get)
        recalled = self._catalog.recall(key)
        grants = await self._acquire([recalled], selector_of(get.version), cost, get.timeout)
        try:
            opened = self._open_state_dict(recalled, grants[0], self._failover.choose())
            plan, _ = self._plan(key, destination, opened, cost)
            reduced = self._reduced(key, destination, opened, plan) if get.delta else None
            return explain_plan(key, opened, plan, reduced, known=cost.hit, last_rate=self._mover.last_rate)
        finally:
            self._remote.release(grants)

    def forget(self, keys: tuple[str, ...]) -> None:
        """The keys were deleted: drop their plans and records."""
        self._catalog.forget(keys)
        if self._board is not None:
            self._board.forget(keys)
        for key in keys:
            self._plans.forget(key)
            self._contents.pop(key)
            self._peer_source.forget(key)

    def withdraw(self, key: str) -> None:
        """Stop offering what was read to other readers."""
        self._peer_source.withdraw(key)

    def close(self) -> None:
        """Release what was offered."""
        self._peer_source.close()

    # Steps ----------------------------------------------------------------------------------------------

    async def _acquire(
        self, asked: list[Recalled], selector: Selector, cost: Cost, timeout: float, read_group: str = ""
    ) -> tuple[Grant, ...]:
        with cost.spent_on("control"):
            grants: tuple[Grant, ...]
            if read_group:
                among = Wanted(asked[0].key, selector, asked[0].ids, read_group, timeout * _PATIENCE)
                grants = await self._remote.acquire_batch((among,), timeout)
            elif len(asked) == 1:
                grants = (await self._remote.acquire(asked[0].key, selector, asked[0].ids, timeout),)
            else:
                wanted = tuple(Wanted(recalled.key, selector, recalled.ids) for recalled in asked)
                grants = await self._remote.acquire_batch(wanted, timeout)
        cost.wait_s += grants[0].waited_s
        cost.slowest_rank, cost.spread_s = grants[0].slowest_rank, grants[0].spread_s
        return grants

    async def _posted(self, key: str, cost: Cost, timeout: float) -> tuple[int, bytes] | None:
        """The newest version of a small value from the board; None: the controller has to be asked."""
        if self._board is None:
            return None
        found = self._board.look(key)
        if found is None:
            page = self._board.missing_page(key)
            if page is None:
                return None
            with cost.spent_on("control"):
                self._board.add_page(page, await self._remote.board(page, timeout))
            found = self._board.look(key)
        if found is not None:
            await asyncio.sleep(0)  # a caller that polls in a loop must let other tasks run
        return found

    def _with_failover(self, of: _Read, read: Callable[[Choose, float], Awaitable[T]]) -> Awaitable[T]:
        """Read a granted version; if volumes are lost, from other copies if there are any."""
        if not any(share.copies for share in of.grant.shares):
            return read(self._failover.choose(), of.end)
        return self._failover.read(self._catalog.volumes(of.recalled, of.grant), of.end, read)

    def _value(self, of: _Read, request: ValueRequest) -> Awaitable[Any]:
        """The requested value."""
        return self._with_failover(of, partial(self._value_from, of, request))

    async def _value_from(self, of: _Read, request: ValueRequest, choose: Choose, end: float) -> Any:
        key, grant, cost = of.recalled.key, of.grant, of.cost
        if grant.inline:
            if grant.place is not None and self._board is not None:
                self._board.learn(key, grant.place)
            return inline_value(key, request, grant.inline)
        opened = self._catalog.open(of.recalled, grant, choose)
        cost.mode = opened.mode
        item = opened.tensors().get(grant.item)
        if item is None:
            objects = objects_of(opened)
            if grant.item in objects:
                return as_object(key, request, objects[grant.item])
            raise KindMismatchError(key, "a state dict is stored there: use get_state_dict")
        if item.pickled:
            data = torch.empty(item.global_shape, dtype=torch.uint8, device="cpu")
            await self._read_one(key, opened, describe(data, key=key), cost, _left(end), data)
            return as_object(key, request, load(data.numpy().tobytes()))
        target, result = target_of(key, request, item)
        await self._read_one(key, opened, target, cost, _left(end), result)
        return result

    def _read_single(self, cost: Cost, timeout: float) -> ReadOne:
        """The function that reads one value of a batch."""
        end = cost.begin + check_seconds("timeout", timeout)

        async def read(key: str, request: ValueRequest, grant: Grant) -> Any:
            return await self._value(_Read(Recalled(key, {}), grant, cost, end), request)

        return read

    async def _read_one(
        self, key: str, opened: Opened, target: LocalTensor, cost: Cost, timeout: float, into: torch.Tensor
    ) -> None:
        # One tensor's plan is built faster than anything that it moves; keeping it would keep the tensor.
        cost.hit = False
        with cost.spent_on("compile"):
            plan = compile_targets(opened.grant.key, opened, {opened.grant.item: target}, {})
        with written([into]):
            await self._mover.run(key, opened, plan, cost, timeout)

    def _state_dict(self, of: _Read, destination: Destination) -> Awaitable[_Filled]:
        """Fill a state dict."""
        return self._with_failover(of, partial(self._state_dict_from, of, destination))

    async def _state_dict_from(self, of: _Read, destination: Destination, choose: Choose, end: float) -> _Filled:
        key, delta, grant, cost = of.recalled.key, destination.get.delta, of.grant, of.cost
        with cost.spent_on("describe"):
            opened = self._open_state_dict(of.recalled, grant, choose)
        cost.mode = opened.mode
        plan, created = self._plan(key, destination, opened, cost)
        reduced: DeltaRead | None = None
        if delta:
            with cost.spent_on("compile"):
                reduced = self._reduced(key, destination, opened, plan)
        self._contents.pop(key)  # until all of it has arrived, the destination holds no version
        # The publisher's checksums are those of the sent bytes, and cannot verify the converted values.
        can_be_offered = not created and not (plan.landings and plan.proof is not None)
        # A later delta starts from the received elements, and a copy that was dequantized elsewhere has none.
        borrow = opened.peer_copy is not None and can_be_offered and reduced is None and not (delta and plan.landings)
        into = into_entries(key, destination, grant.overwritten) if grant.overwritten else {}
        with written(destination.leaves[name] for name in plan.filled):
            borrowed = borrow and await self._borrow(key, destination, opened, plan, cost, _left(end))
            if not borrowed:
                await self._mover.run(key, opened, plan, cost, _left(end), reduced)
        singly = await self._overwritten(into, replace(of, end=end)) if into else {}
        if delta and not created and not grant.overwritten:
            self._contents.put(key, DestinationContents.of(destination.mark, opened, plan))
        state = rebuild(destination, created, opened, singly)
        return _Filled(state, can_be_offered and not grant.overwritten, borrow and not borrowed)

    async def _overwritten(self, into: Mapping[str, torch.Tensor | None], of: _Read) -> dict[str, Any]:
        """Read the entries that were put separately since. Returns those for which no tensor was given."""
        values: dict[str, Any] = {}
        for name, single in zip(of.grant.overwritten, of.grant.singles, strict=True):
            if name not in into:
                continue
            request = ValueRequest(into[name])
            value = await self._value(replace(of, recalled=Recalled(single.key, {}), grant=single), request)
            if request.into is None:
                values[name] = value
        return values

    async def _borrow(
        self, key: str, destination: Destination, opened: Opened, plan: Plan, cost: Cost, timeout: float
    ) -> bool:
        """Read another reader's copy.

        Returns:
            Whether it was read. If not, the bytes that have arrived are not used.
        """
        peer = opened.peer_copy
        if peer is None:
            return False
        try:
            copy = self._plans.find(key, destination.mark, peer.ids)
            if copy is None:
                cost.hit = False
                with cost.spent_on("compile"):
                    copy = compile_copy(key, destination, opened, peer)
                self._plans.keep(key, destination.mark, peer.ids, copy)
            await self._mover.move(key, peer, copy, copy, cost, timeout * _PATIENCE)
            if plan.proof is not None:  # by the publisher's checksums
                await self._mover.move(key, opened, plan, DeltaRead(RDMAAction(), 0, (), {}), cost, timeout)
        except (StoreError, DataplaneError):
            return False
        cost.lent_nbytes += copy.nbytes
        return True

    def _finish(self, key: str, destination: Destination, grant: Grant, filled: _Filled) -> None:
        """Return the lease, and offer the copy to others."""
        share: Share | None = None
        if filled.can_be_offered:
            with suppress(DataplaneError):  # memory that cannot be registered is not offered
                share = self._peer_source.offer(key, destination)
        self._remote.finish(grant, share, failed=filled.failed)

    def _open_state_dict(self, recalled: Recalled, grant: Grant, choose: Choose) -> Opened:
        opened = self._catalog.open(recalled, grant, choose) if grant.shares else None
        if opened is None or opened.kind != "state_dict" or grant.item:
            raise KindMismatchError(recalled.key, "a single value is stored there: use get")
        return opened

    def _plan(
        self, key: str, destination: Destination, opened: Opened, cost: Cost
    ) -> tuple[Plan, dict[str, torch.Tensor]]:
        """The plan of a read, and the tensors that had to be created because none were given for them."""
        plan = self._plans.find(key, destination.mark, opened.ids)
        created: dict[str, torch.Tensor] = {}
        if plan is None:
            cost.hit = False
            with cost.spent_on("compile"):
                alike = self._plans.alike(key, destination.mark)
                plan, created = compile_state_dict(key, destination, opened, alike.landings if alike else {})
            if not created:
                self._plans.keep(key, destination.mark, opened.ids, plan)
        return plan, created

    def _reduced(self, key: str, destination: Destination, opened: Opened, plan: Plan) -> DeltaRead | None:
        """The plan without what the destination already holds; None: all of it has to be read."""
        held = self._contents.get(key)
        changes = held.changes(destination.mark, plan, opened) if held is not None else None
        return None if changes is None else compile_delta(plan, opened.sources, changes)


def _left(end: float) -> float:
    """Seconds until then."""
    return max(end - time.perf_counter(), _LEAST_S)
