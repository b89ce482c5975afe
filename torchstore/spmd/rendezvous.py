"""`Rendezvous`: the actor in rank 0's process where the ranks of a store meet, and where they leave it.

A rank arrives, gets its place, brings a process for a volume if one is wanted, waits until rank 0 has started the
store, and reports that it is ready. All go on when all are ready. At the end each rank leaves, and rank 0 shuts the
store down when all have left. If a rank fails or dies on the way, all ranks fail with its message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from skipper.control import Actor, ProcMesh, concurrent_endpoint
from skipper.torchstore.errors import StoreError, StoreRendezvousError, StoreTimeoutError
from skipper.torchstore.spmd.ranks import RankPlace

T = TypeVar("T")

_ACKNOWLEDGE_S = 10.0
"""How long rank 0 waits, before it ends, until the others know that the store is shut down."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A rank that arrives.

    Attributes:
        rank: Its number.
        host: The id of its host.
        pid: Its process id.
        pids: The pid namespace; a host with containers may have several.
        procs: Its process, for control.
    """

    rank: int
    host: str
    pid: int
    pids: int
    procs: ProcMesh


@dataclass(slots=True)
class _Round:
    """One store, from the arrival of the first rank until the last one leaves.

    Attributes:
        number: The number of the round, during the life of rank 0.
        world_size: The number of ranks.
        arrivals: The ranks that have arrived.
        brought: The ids (in control) of the processes that host a volume, by the rank that has brought them.
        is_started: Whether rank 0 has started the store.
        ready: The ranks that can use the store.
        failure: Why it failed.
        left: The ranks that have left the store or ended.
        is_over: Whether the store is shut down.
        informed: The ranks that know that it is shut down.
    """

    number: int
    world_size: int
    arrivals: dict[int, Arrival] = field(default_factory=dict)
    brought: dict[int, str] = field(default_factory=dict)
    is_started: bool = False
    ready: set[int] = field(default_factory=set)
    failure: StoreError | None = None
    left: set[int] = field(default_factory=set)
    is_over: bool = False
    informed: set[int] = field(default_factory=set)

    def missing(self, those: Iterable[int]) -> list[int]:
        """All ranks except those."""
        return sorted(set(range(self.world_size)) - set(those))

    @property
    def is_complete(self) -> bool:
        """Whether all ranks have met."""
        return len(self.ready) == self.world_size

    def place(self, rank: int) -> RankPlace:
        """The place of a rank, after all have arrived."""
        hosts: dict[str, list[int]] = {}
        for number in sorted(self.arrivals):
            hosts.setdefault(self.arrivals[number].host, []).append(number)
        arrival = self.arrivals[rank]
        local = hosts[arrival.host]
        beside = [self.arrivals[number] for number in local if self.arrivals[number].pids == arrival.pids]
        return RankPlace(
            rank=rank,
            world_size=self.world_size,
            local_rank=local.index(rank),
            local_world_size=len(local),
            host_rank=list(hosts).index(arrival.host),
            num_hosts=len(hosts),
            local_pids=tuple(other.pid for other in beside),
        )


class Rendezvous(Actor):
    """The meeting point of a store's ranks; every wait has a deadline, and ends when a rank has failed or died."""

    def __init__(self) -> None:
        self._round: _Round | None = None
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    @concurrent_endpoint
    async def open(self, world_size: int) -> None:
        """Start a new round; rank 0 calls this before it admits any rank."""
        self._round = _Round(1 if self._round is None else self._round.number + 1, world_size)
        await self._tell()

    @concurrent_endpoint
    async def arrive(self, arrival: Arrival, timeout: float) -> tuple[RankPlace, int]:
        """Report this rank, and wait for all others.

        Returns:
            The place of the rank, and the number of the round, for `leave`.

        Raises:
            StoreTimeoutError: Some have not come; the message names them.
            StoreRendezvousError: One has failed.
        """
        # A rank that is in the job for another store may arrive before rank 0 has started the new round.
        here = await self._until(
            lambda: self._round if self._round is not None and self._expects(self._round, arrival.rank) else None,
            timeout,
            lambda: "rank 0 did not arrive",
        )
        here.arrivals[arrival.rank] = arrival
        if arrival.rank:
            loop = asyncio.get_running_loop()
            arrival.procs.ended.add_done_callback(lambda _: self._soon(loop, here, arrival))
        await self._tell()
        await self._in_round(
            here,
            lambda: len(here.arrivals) == here.world_size,
            timeout,
            lambda: f"{_named(here.missing(here.arrivals))} did not arrive",
        )
        return here.place(arrival.rank), here.number

    @concurrent_endpoint
    async def bring(self, rank: int, process_id: str) -> None:
        """Report a process that has joined the job to host a volume."""
        self._now().brought[rank] = process_id
        await self._tell()

    @concurrent_endpoint
    async def brought(self, count: int, timeout: float) -> list[str]:
        """Wait for this many processes for volumes. Returns them in the order of the ranks that have brought them.

        Raises:
            StoreTimeoutError: They did not come.
            StoreRendezvousError: A rank has failed.
        """
        here = self._now()
        await self._in_round(
            here,
            lambda: len(here.brought) == count,
            timeout,
            lambda: f"only {len(here.brought)} of {count} processes for volumes arrived",
        )
        return [here.brought[rank] for rank in sorted(here.brought)]

    @concurrent_endpoint
    async def fail(self, rank: int, reason: str, is_timeout: bool) -> None:
        """Fail the rendezvous for all ranks, unless it has failed already or all are ready."""
        here = self._round
        if here is not None and here.failure is None and not here.is_complete:
            kind = StoreTimeoutError if is_timeout else StoreRendezvousError
            here.failure = kind(f"rank {rank} failed: {reason}")
            await self._tell()

    @concurrent_endpoint
    async def started(self) -> None:
        """Report that rank 0 has started the store."""
        self._now().is_started = True
        await self._tell()

    @concurrent_endpoint
    async def wait_for_start(self, timeout: float) -> None:
        """Wait until rank 0 has started the store.

        Raises:
            StoreTimeoutError: It did not in time.
            StoreRendezvousError: A rank has failed.
        """
        here = self._now()
        await self._in_round(here, lambda: here.is_started, timeout, lambda: "rank 0 did not start the store")

    @concurrent_endpoint
    async def ready(self, rank: int, timeout: float) -> None:
        """Report that this rank can use the store, and wait until all can.

        Raises:
            StoreTimeoutError: Some are not in time; the message names them.
            StoreRendezvousError: One has failed.
        """
        here = self._now()
        here.ready.add(rank)
        await self._tell()
        missing = lambda: f"{_named(here.missing(here.ready))} did not get ready"  # noqa: E731
        await self._in_round(here, lambda: here.is_complete, timeout, missing)

    @concurrent_endpoint
    async def leave(self, number: int, rank: int, timeout: float) -> None:
        """Leave the store, and wait until rank 0 has shut it down.

        Raises:
            StoreTimeoutError: It did not in time.
        """
        here = self._now()
        if here.number != number:
            return  # rank 0 has started a new round since: the store is shut down
        here.left.add(rank)
        await self._tell()
        await self._until(lambda: here.is_over or None, timeout, lambda: "rank 0 has not shut the store down")

    @concurrent_endpoint
    async def inform(self, rank: int) -> None:
        """Report that this rank knows that the store is shut down."""
        if self._round is not None:
            self._round.informed.add(rank)
            await self._tell()

    @concurrent_endpoint
    async def wait_for_others(self, timeout: float) -> list[int]:
        """Wait until all ranks except 0 have left the store. Returns those that have not, after ``timeout``."""
        here = self._now()
        try:
            await self._until(lambda: not here.missing({0, *here.left}) or None, timeout, lambda: "others use it")
        except StoreTimeoutError:
            return here.missing({0, *here.left})
        return []

    @concurrent_endpoint
    async def close(self) -> None:
        """Announce that the store is shut down; returns when the waiting ranks know it."""
        here = self._now()
        here.is_over = True
        await self._tell()
        try:
            await self._until(
                lambda: here.left <= here.informed | {0} or None,
                _ACKNOWLEDGE_S,
                lambda: "other ranks do not know it yet",
            )
        except StoreTimeoutError:
            return  # the others have had their time

    # ------------------------------------------------------------------------------------------------------

    def _now(self) -> _Round:
        if self._round is None:
            raise StoreRendezvousError("rank 0 has not opened the rendezvous")
        return self._round

    @staticmethod
    def _expects(here: _Round, rank: int) -> bool:
        """Whether a rank that arrives now belongs to this round, and not to the next store of this name."""
        return not here.is_over and rank not in here.arrivals

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _soon(self, loop: asyncio.AbstractEventLoop, here: _Round, arrival: Arrival) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._gone, here, arrival)

    def _gone(self, here: _Round, arrival: Arrival) -> None:
        """A rank's process has ended, or has left the job."""
        here.left.add(arrival.rank)
        here.informed.add(arrival.rank)
        if not here.is_complete and here.failure is None:
            here.failure = StoreRendezvousError(f"rank {arrival.rank} has ended, process {arrival.pid}")
        task = asyncio.get_running_loop().create_task(self._tell())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _in_round(
        self, here: _Round, done: Callable[[], bool], timeout: float, missing: Callable[[], str]
    ) -> None:
        """Wait for a condition, unless a rank fails first."""
        await self._until(lambda: here.failure is not None or done() or None, timeout, missing)
        if here.failure is not None and not here.is_complete:
            raise here.failure

    async def _until(self, found: Callable[[], T | None], timeout: float, missing: Callable[[], str]) -> T:
        """Wait until ``found`` returns something.

        Raises:
            StoreTimeoutError: It did not in time.
        """
        try:
            async with asyncio.timeout(timeout), self._changed:
                while (result := found()) is None:
                    await self._changed.wait()
                return result
        except TimeoutError:
            raise StoreTimeoutError(f"{missing()} in {timeout:.0f} s") from None


def _named(ranks: list[int]) -> str:
    return ", ".join(f"rank {rank}" for rank in ranks)
