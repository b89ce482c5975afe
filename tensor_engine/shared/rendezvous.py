"""How workers find each other: through an actor of the script, over the job's own links. It opens no port."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from torch._C._distributed_c10d import HashStore, Store

from skipper.control import (
    Actor,
    ActorError,
    ControlError,
    Future,
    ProcMesh,
    concurrent_endpoint,
    get_or_spawn_controller,
)
from skipper.control.support.gathering import Gatherings
from skipper.tensor_engine.errors import CommunicationError, CommunicationTimeoutError, MemberLostError

T = TypeVar("T")

_NAME = "skipper-engine-rendezvous"
_GRACE_S = 10.0
"""How long an answer may take to arrive, beyond the time of the wait itself."""

_MOST_LOST = 100_000
"""How many ended workers are remembered: no worker waits for one that ended long ago."""


class RendezvousServer(Actor):
    """Where workers wait for each other and keep the keys of their stores: one actor of the job, in the script."""

    def __init__(self) -> None:
        self._gatherings: Gatherings[Any] = Gatherings()
        self._stores: dict[str, HashStore] = {}
        self._left: dict[str, int] = {}  # members that still use a store, by its name
        self._changed = asyncio.Condition()
        self._waiting: dict[object, tuple[str, tuple[int, ...]]] = {}  # by call: the gathering, and its members
        self._lost: dict[int, str] = {}  # workers that have ended, and their processes
        self._tasks: set[asyncio.Task[None]] = set()

    @concurrent_endpoint
    async def watch(self, first: int, procs: ProcMesh, ranks: Collection[int]) -> None:
        """When one of these processes ends, notify the workers that wait for its worker.

        Args:
            first: the number of the first worker; those of the others follow it.
            procs: their processes, all of a mesh.
            ranks: ranks of the watched processes.
        """
        loop = asyncio.get_running_loop()
        for rank, point in zip(procs.ranks, procs.extent.points(), strict=True):
            if rank not in ranks:
                continue
            ended = partial(self._soon, loop, first + rank, f"{procs.name}{dict(point)}")
            procs.slice(**point).ended.add_done_callback(ended)

    @concurrent_endpoint
    async def gather(
        self, key: str, brought: dict[int, Any], members: tuple[int, ...], timeout_s: float
    ) -> dict[int, Any]:
        """Give a value, and wait for the values of all members: see `Gatherings.gather`.

        Raises:
            AbsentError: (a `TimeoutError`) some have not arrived.
            MemberLostError: one of them has ended.
            ValueError: they disagree on the members.
        """
        self._check(members)
        call = object()
        self._waiting[call] = key, members
        try:
            ranks = range(len(members))
            return await self._gatherings.gather(key, brought, expected=ranks, timeout_s=timeout_s)
        finally:
            del self._waiting[call]

    @concurrent_endpoint
    async def change(self, store: str, operation: str, arguments: tuple[Any, ...]) -> Any:
        """Run an operation of a store that does not wait, by its name in `HashStore`."""
        result = getattr(self._stores.setdefault(store, HashStore()), operation)(*arguments)
        await self._tell()
        return result

    @concurrent_endpoint
    async def read(self, store: str, keys: list[str], members: tuple[int, ...], timeout_s: float) -> list[bytes]:
        """The values under these keys, once all exist.

        Raises:
            MemberLostError: one of the members of the store has ended.
            TimeoutError: some do not exist in time.
        """
        kept = self._stores.setdefault(store, HashStore())
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: kept.check(keys) or not self._lost.keys().isdisjoint(members))
        except TimeoutError:
            missing = [key for key in keys if not kept.check([key])]
            raise TimeoutError(f"no worker has set {', '.join(missing)} within {timeout_s:g} s") from None
        if not kept.check(keys):
            self._check(members)
        return [kept.get(key) for key in keys]

    @concurrent_endpoint
    async def until_lost(self, members: tuple[int, ...]) -> list[int]:
        """Wait until some of these workers have ended, and return which."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._lost.keys().isdisjoint(members))
        return [number for number in members if number in self._lost]

    @concurrent_endpoint
    async def forget(self, store: str, members: int) -> None:
        """A member does not need a store any more. When all of ``members`` have said so, the store is forgotten."""
        left = self._left.pop(store, members) - 1
        if left:
            self._left[store] = left
        else:
            self._stores.pop(store, None)

    def _soon(self, loop: asyncio.AbstractEventLoop, number: int, worker: str, ended: Future[None]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._lose, number, worker)

    def _lose(self, number: int, worker: str) -> None:
        self._lost[number] = worker
        if len(self._lost) > _MOST_LOST:
            del self._lost[next(iter(self._lost))]
        for key, members in self._waiting.values():
            if number in members:
                self._gatherings.fail(key, MemberLostError(worker))
        task = asyncio.get_running_loop().create_task(self._tell())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _check(self, members: Collection[int]) -> None:
        for number in members:
            if number in self._lost:
                raise MemberLostError(self._lost[number])


def watch(first: int, procs: ProcMesh, ranks: Collection[int]) -> None:
    """When one of these processes ends, notify the workers that wait for its worker. Returns at once.

    Args:
        first: the number of the worker in the first of the processes; those of the others follow it.
        procs: all processes of a mesh.
        ranks: ranks of the watched processes.
    """

    def begin(found: Future[Any]) -> None:
        with contextlib.suppress(ControlError):  # the job is over
            found.get(0).watch.broadcast(first, procs, tuple(ranks))

    get_or_spawn_controller(_NAME, RendezvousServer).add_done_callback(begin)


class RendezvousClient:
    """A worker's access to the job's `RendezvousServer`.

    Args:
        timeout_s: limit of each wait.

    Raises:
        CommunicationError: the script cannot be asked.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.actor = answer(get_or_spawn_controller(_NAME, RendezvousServer), timeout_s)

    def gather(self, key: str, brought: Mapping[int, T], members: Sequence[int]) -> dict[int, T]:
        """Give a value, and wait for the values of all members, by rank.

        Args:
            key: the same for all of them.
            brought: values by rank.
            members: the numbers of the workers, in the order of their ranks.

        Raises:
            CommunicationTimeoutError: some have not arrived in time; the message names them.
            MemberLostError: one of them has ended.
            CommunicationError: the script cannot be asked.
        """
        return answer(self.begin_gathering(key, brought, members), self.timeout_s)

    def begin_gathering(self, key: str, brought: Mapping[int, T], members: Sequence[int]) -> Future[dict[int, T]]:
        """As `gather`, without waiting."""
        gather: Any = self.actor.gather
        begun: Future[dict[int, T]] = gather.call_one(key, dict(brought), tuple(members), self.timeout_s)
        return begun


def answer(future: Future[T], timeout_s: float) -> T:
    """The script's answer to a request that may take ``timeout_s`` there.

    Raises:
        CommunicationTimeoutError: it took too long; or a worker did not arrive, and the message names it.
        MemberLostError: one of the awaited workers has ended.
        CommunicationError: the script cannot be asked, or refuses.
    """
    try:
        return future.get(timeout_s + _GRACE_S)
    except ActorError as error:
        if isinstance(error.cause, MemberLostError):
            raise MemberLostError(error.cause.worker) from error
        kind = CommunicationTimeoutError if isinstance(error.cause, TimeoutError) else CommunicationError
        raise kind(error.summary if error.cause is None else str(error.cause)) from error
    except TimeoutError as error:
        raise CommunicationTimeoutError(f"the script did not answer: {error}") from error
    except ControlError as error:
        raise CommunicationError(f"the script cannot be asked: {error}") from error


class JobStore(Store):
    """A store of `torch.distributed` in the script's process. torch calls these methods from C++.

    Args:
        rendezvous: sends the requests to the script.
        name: name of the store; members of a group give the same.
        members: the numbers of those workers.
        is_written_once: whether a key keeps its value, so that this client asks for it once.

    Raises:
        CommunicationTimeoutError: (from all methods) a key does not exist in time.
        MemberLostError: (from all methods) a member has ended, and a key does not exist.
        CommunicationError: (from all methods) the script cannot be asked.
    """

    def __init__(
        self, rendezvous: RendezvousClient, name: str, members: tuple[int, ...], *, is_written_once: bool = False
    ) -> None:
        super().__init__()
        self._members = members
        self._rendezvous = rendezvous
        self._name = name
        self._is_written_once = is_written_once
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        """Set a value."""
        self._change("set", key, value)

    def get(self, key: str) -> bytes:
        """The value, once it exists."""
        return self._read([key], self._rendezvous.timeout_s)[0]

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        """Wait until all exist."""
        self._read(keys, self._rendezvous.timeout_s if timeout is None else timeout.total_seconds())

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all exist."""
        return bool(self._change("check", list(keys)))

    def add(self, key: str, amount: int) -> int:
        """Add to a number; returns the sum."""
        return int(self._change("add", key, amount))

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Replace the value if it is the expected one; returns the value after that."""
        return bytes(self._change("compare_set", key, expected, desired))

    def append(self, key: str, value: bytes | str) -> None:
        """Append to a value."""
        self._change("append", key, value)

    def delete_key(self, key: str) -> bool:
        """Delete a key; returns whether it existed."""
        return bool(self._change("delete_key", key))

    def num_keys(self) -> int:
        """How many keys there are."""
        return int(self._change("num_keys"))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values, once all exist."""
        return self._read(keys, self._rendezvous.timeout_s)

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        """Put values there."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """True: it has `append`, `multi_get` and `multi_set`."""
        return True

    def clone(self) -> JobStore:
        """Another client of the same store."""
        return JobStore(self._rendezvous, self._name, self._members, is_written_once=self._is_written_once)

    def forget(self) -> None:
        """This member does not need the store any more. When all have said so, all keys are forgotten."""
        answer(self._rendezvous.actor.forget.call_one(self._name, len(self._members)), self._rendezvous.timeout_s)

    def _change(self, operation: str, *arguments: Any) -> Any:
        return answer(
            self._rendezvous.actor.change.call_one(self._name, operation, arguments), self._rendezvous.timeout_s
        )

    def _read(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        unknown = [key for key in keys if key not in self._known]
        found = dict(self._known)
        if unknown:
            read = self._rendezvous.actor.read.call_one(self._name, unknown, self._members, timeout_s)
            values = answer(read, timeout_s)
            found.update(zip(unknown, values, strict=True))
        if self._is_written_once:
            self._known = found
        return [found[key] for key in keys]
