"""The controller and the volumes for a client, with calls that raise the store's own errors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any, NoReturn, TypeVar

from skipper.control import ControlError, Future, SupervisionError
from skipper.control.model.bounds import check_seconds
from skipper.dataplane import RDMABuffer
from skipper.dataplane.errors import BufferDroppedError, DataplaneError, OwnerDiedError, TransferTimeoutError
from skipper.torchstore.algebra.copies import place
from skipper.torchstore.algebra.manifest import Binding
from skipper.torchstore.clients.controller_link import Call, ControllerLink, leases_of
from skipper.torchstore.errors import (
    PublisherLostError,
    SourceChangedError,
    StoreTimeoutError,
    VolumeFullError,
    VolumeLostError,
)
from skipper.torchstore.peers.shm_value_board import open_answer
from skipper.torchstore.peers.volume import DeadWriterError
from skipper.torchstore.protocol.batches import BatchGrant, BatchPublication
from skipper.torchstore.protocol.messages import (
    UNNUMBERED,
    Controller,
    Grant,
    Publication,
    Published,
    RequestNumber,
    Retired,
    Selector,
    Share,
    StaleClientError,
    StoreInfo,
    Wanted,
)
from skipper.torchstore.support.deadlines import ask
from skipper.torchstore.support.process import ProcessId, this_process

T = TypeVar("T")

DEFAULT_TIMEOUT_S = 60.0
"""The default timeout of an operation."""

_GRACE_S = 5.0  # the controller's own deadline gives the better message, so it comes first


class RequestNumbers:
    """The requests of one client in flight; each is done once, even if it is sent several times. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._last = 0
        self._waiting: dict[int, None] = {}  # the oldest first

    @contextmanager
    def next(self) -> Iterator[RequestNumber]:
        """A request that is in flight until the end of the block."""
        with self._lock:
            self._last += 1
            number = self._last
            self._waiting[number] = None
            request = (number, next(iter(self._waiting)))
        try:
            yield request
        finally:
            with self._lock:
                del self._waiting[number]


@dataclass(slots=True)
class RemoteStore:
    """One store, seen from one process.

    Attributes:
        entrance: The actor that has the store's name.
        info: What it has reported about the store.
        calls: How many control messages this client has sent.
        lost: Volumes that have been found dead. None of them comes back.
    """

    store_name: str
    entrance: Controller
    info: StoreInfo
    calls: int = 0
    lost: set[str] = field(default_factory=set)
    _requests: RequestNumbers = field(default_factory=RequestNumbers)
    _link: ControllerLink = field(init=False)

    def __post_init__(self) -> None:
        self._link = ControllerLink(self.store_name, self.entrance, self.info)

    @property
    def controller(self) -> Controller:
        """The controller that is there now, as far as this client knows."""
        return self._link.actor

    # Plain functions in place of coroutines that would only wait for another one: a small put calls all of them.

    def ask(self, call: Call[T], timeout: float, *, grants: bool = False) -> Awaitable[T]:
        """The controller's answer.

        ``call`` sends the message; again, if the controller has died and another one is there. ``grants``: the answer
        may be a lease.

        Raises:
            StoreError: What the endpoint raised.
            StoreTimeoutError: No answer in time.
            SupervisionError: The controller is dead, and there is no other.
            ActorError: The endpoint failed otherwise.
        """
        self.calls += 1
        if self._link.may_change:
            return self._link.ask(call, timeout, grants=grants)
        return ask(call(self._link.actor), timeout)

    def ask_once(self, call: Callable[[Controller, RequestNumber], Future[T]], timeout: float) -> Awaitable[T]:
        """`ask` for something that must be done once, even if the request has to be sent again."""
        if self._link.may_change:
            return self._ask_numbered(call, timeout)
        self.calls += 1
        return ask(call(self._link.actor, UNNUMBERED), timeout)

    async def _ask_numbered(self, call: Callable[[Controller, RequestNumber], Future[T]], timeout: float) -> T:
        with self._requests.next() as request:
            return await self.ask(lambda to: call(to, request), timeout)

    async def publish(
        self, publications: tuple[Publication | BatchPublication, ...], timeout: float
    ) -> tuple[Published, ...]:
        """See `StoreController.publish`."""
        return await self.ask_once(
            lambda to, request: to.publish.call_one(self.info.client, publications, request), timeout
        )

    async def reclaim(self, timeout: float) -> tuple[Retired, ...]:
        """See `StoreController.reclaim`."""
        return await self.ask_once(lambda to, request: to.reclaim.call_one(self.info.client, request), timeout)

    def put_inline(self, key: str, value: bytes, timeout: float) -> Awaitable[int]:
        """See `StoreController.put_inline`."""
        return self.ask_once(
            lambda to, request: to.put_inline.call_one(self.info.client, key, value, *request), timeout
        )

    async def acquire(self, key: str, selector: Selector, known: tuple[str, ...], timeout: float) -> Grant:
        """See `StoreController.acquire`."""
        plain = (self.info.client, key, selector.exact, selector.newer_than, " ".join(known), timeout)
        answer: Grant | bytes = await self._granted(lambda to: to.acquire.call_one(*plain), timeout)
        if isinstance(answer, bytes):
            version, place, value = open_answer(answer)
            return Grant(key, version, inline=value, place=place)
        return answer

    async def board(self, page: int, timeout: float) -> RDMABuffer:
        """See `StoreController.board`."""
        return await self.ask(lambda to: to.board.call_one(self.info.client, page), timeout)

    async def acquire_batch(self, wanted: tuple[Wanted, ...], timeout: float) -> tuple[Grant, ...]:
        """See `StoreController.acquire_batch`."""
        grants: tuple[Grant, ...] = await self._granted(
            lambda to: to.acquire_batch.call_one(self.info.client, wanted, timeout), timeout
        )
        return grants

    async def acquire_values(self, keys: tuple[str, ...], timeout: float) -> BatchGrant:
        """See `StoreController.acquire_values`."""
        grant: BatchGrant = await self._granted(
            lambda to: to.acquire_values.call_one(self.info.client, keys, timeout), timeout
        )
        return grant

    async def _granted(self, call: Call[Any], timeout: float) -> Any:
        """Wait for a grant. One that comes after the caller has left is returned at once."""
        seconds = check_seconds("timeout", timeout)
        last: list[Future[Any]] = []

        def expected(to: Controller) -> Future[Any]:
            answer = call(to)
            last[:] = [answer]
            return answer

        try:
            return await self.ask(expected, seconds + _GRACE_S, grants=True)
        except (asyncio.CancelledError, StoreTimeoutError):
            for answer in last:
                answer.add_done_callback(self._release_late)
            raise

    def _release_late(self, call: Future[Any]) -> None:
        with suppress(ControlError):  # the answer was an error: nothing was granted
            answer = call.get(0)
            if isinstance(answer, BatchGrant):
                self.release_values(answer)
                return
            self.release(answer if isinstance(answer, tuple) else (answer,) if isinstance(answer, Grant) else ())

    def release(self, grants: tuple[Grant, ...]) -> None:
        """Return leases, without waiting."""
        self._release(leases_of(grants))

    def release_values(self, granted: BatchGrant) -> None:
        """Return all leases of a batch by one message, without waiting."""
        self._release(leases_of(granted.others.values()), granted.lease)

    def _release(self, leases: tuple[tuple[str, int], ...], batch: int = 0) -> None:
        if leases or batch:
            self.calls += 1
            self._link.give_back(leases, batch, lambda to: to.release.call(leases, batch))

    def finish(self, grant: Grant, share: Share | None, *, failed: bool) -> None:
        """See `StoreController.finish`; without waiting."""
        self.calls += 1
        told = (self.info.client, grant.key, grant.lease, share, failed)
        self._link.give_back(((grant.key, grant.lease),), 0, lambda to: to.finish.call(*told))

    def withdraw(self, key: str) -> None:
        """See `StoreController.withdraw`; without waiting."""
        self.calls += 1
        self.controller.withdraw.call(self.info.client, key)

    async def fence(self, key: str, *, close: bool, timeout: float) -> None:
        """See `StoreController.fence`."""
        seconds = check_seconds("timeout", timeout)
        await self.ask(lambda to: to.fence.call_one(self.info.client, key, close, seconds), seconds + _GRACE_S)

    async def delete(self, keys: tuple[str, ...], *, missing_ok: bool, timeout: float) -> None:
        """See `StoreController.delete`."""
        await self.ask_once(
            lambda to, request: to.delete.call_one(self.info.client, keys, missing_ok, request), timeout
        )

    def choose_volume(self) -> str:
        """The volume that this process writes to."""
        return self.info.strategy.choose(tuple(self.info.volumes))

    def place(self, copies: int) -> tuple[str, ...]:
        """The volumes that this process writes to: its own first, then those of neighbours (see `copies.place`)."""
        own = self.choose_volume()
        if copies == 1:
            return (own,)
        return place({name: process.host for name, process in self.info.processes.items()}, own, copies, self.lost)

    async def find_silent(self, volumes: Iterable[str], timeout: float) -> set[str]:
        """Which of these volumes do not answer; those that are dead are `lost` from now on."""

        async def ask_one(volume: str) -> bool:
            try:
                if self.info.processes[volume].is_alive():
                    self.calls += 1
                    await ask(self.info.volumes[volume].identify.call_one(), timeout)
                    return True
            except StoreTimeoutError:
                return False
            except SupervisionError:
                pass
            self.lost.add(volume)
            return False

        asked = tuple(dict.fromkeys(volumes))
        answers = await asyncio.gather(*map(ask_one, asked))
        return {volume for volume, answered in zip(asked, answers, strict=True) if not answered}

    async def allocate(self, volume: str, nbytes: int, timeout: float) -> Binding:
        """A new arena; waits for memory if the volume is full.

        Raises:
            VolumeFullError: It is larger than all that the volume may hold.
            StoreTimeoutError: Nothing was freed in time.
            StaleClientError: The store has taken this process for dead, since it had left the job.
        """
        actor = self.info.volumes[volume]
        end, clock = time.monotonic() + check_seconds("timeout", timeout), 0
        while True:
            allocated = actor.allocate.call_one(this_process(), nbytes, self.info.client)
            try:
                self.calls += 1
                return await ask(allocated, timeout)
            except (asyncio.CancelledError, StoreTimeoutError):
                allocated.add_done_callback(partial(self._free_late, volume))
                raise
            except SupervisionError as error:
                await self.volume_lost(volume, error, timeout)
            except DeadWriterError as error:
                raise StaleClientError(str(error)) from error
            except VolumeFullError as error:
                if error.nbytes > error.limit:
                    raise
            left = max(end - time.monotonic(), 0.0)
            freed: tuple[str, ...]
            clock, freed = await self._make_room(volume, clock, left)
            # The controller has said so to the volume too, but only messages of one sender come in order.
            self.free(volume, freed)

    async def _make_room(self, volume: str, since: int, timeout: float) -> tuple[int, tuple[str, ...]]:
        """See `StoreController.make_room`."""
        return await self.ask(
            lambda to: to.make_room.call_one(self.info.client, volume, since, timeout), timeout + _GRACE_S
        )

    def _free_late(self, volume: str, call: Future[Binding]) -> None:
        with suppress(ControlError):  # the answer was an error: nothing was allocated
            self.free(volume, (call.get(0).id,))

    async def volume_lost(self, volume: str, cause: BaseException, timeout: float) -> NoReturn:
        """Raise the reason why a volume does not answer.

        Raises:
            StaleClientError: Because its store was shut down; there is a new one.
            StoreNotInitializedError: Because its store was shut down; there is no other.
            VolumeLostError: Because it died.
        """
        await self.ask(lambda to: to.check.call_one(self.info.client), timeout)
        raise VolumeLostError(volume, str(cause)) from cause

    def free(self, volume: str, arenas: tuple[str, ...]) -> None:
        """Drop arenas, without waiting."""
        if arenas and volume in self.info.volumes:
            self.calls += 1
            self.info.volumes[volume].free.call(arenas)

    def take_calls(self) -> int:
        """How many control messages were sent since the last call."""
        calls, self.calls = self.calls, 0
        return calls


def explain_transfer(
    error: DataplaneError, key: str, version: int, shares: Sequence[tuple[Binding, ProcessId]]
) -> NoReturn:
    """Translate the error of a failed read: the one place where errors of the data plane become the store's.

    ``shares`` is the memory that was read, each with the process that has it: the publisher in direct mode, the volume
    in snapshot mode.

    Raises:
        PublisherLostError: Direct mode: the owner of the memory is dead.
        SourceChangedError: Direct mode: the owner has dropped the memory.
        VolumeLostError: Snapshot mode: the volume is dead or has dropped the copy.
        StoreTimeoutError: The deadline has passed.
        DataplaneError: Anything else, as it was.
    """
    dead = [(binding, owner) for binding, owner in shares if not owner.is_alive()]
    if dead or isinstance(error, OwnerDiedError | BufferDroppedError):
        binding, owner = (dead or list(shares))[0]
        if binding.mode == "snapshot":
            raise VolumeLostError(binding.volume, str(error)) from error
        if isinstance(error, BufferDroppedError) and not dead:
            raise SourceChangedError(key, version, "the publisher has dropped the memory") from error
        raise PublisherLostError(key, version, f"{owner} has died") from error
    if isinstance(error, TransferTimeoutError):
        raise StoreTimeoutError(f"reading version {version} of {key!r}: {error}") from error
    raise error
