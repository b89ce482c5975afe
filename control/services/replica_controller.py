"""`ReplicaController`: the actor that owns the replicas of a service. It replaces, scales, drains and updates them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from skipper.control.api.actor import Actor, concurrent_endpoint
from skipper.control.api.mesh import HostMesh, this_host
from skipper.control.api.service import ReplicaMetrics, ReplicaState
from skipper.control.model.errors import ActorError, ControlError, ReplicaLostError, SupervisionError
from skipper.control.model.failure import MeshFailure
from skipper.control.runtime import status_providers
from skipper.control.runtime.context import context
from skipper.control.runtime.port import Port
from skipper.control.services.replicas import Blueprint, Replica
from skipper.control.services.router import Tally
from skipper.control.services.subscribers import Subscribers, summary
from skipper.control.services.table import ReplicaSlot, ReplicaTable

_log = logging.getLogger("skipper.control")

_LONGEST_BACKOFF_S = 10.0
_GRACE_S = 1.0
"""How long the rest of a replica that is being replaced has to finish its work."""

_ABSENT = object()
"""In place of the result of a replica that was left out."""

_AGAIN = object()
"""In place of the result of a replica that died: its successor is to be called."""

_COLUMNS = ("replica", "state", "restarts", "under way", "done", "errors", "lost", "mean ms", "longest ms")
_COUNTS_INTERVAL_S = 5.0
"""While somebody watches the job, callers are asked for their counts at most this often."""

_DOUBT_S = 10.0
"""If a caller has lost a replica that lives on here for this long, the caller cannot reach it and must not wait."""

_MISSES = 2
"""Health checks in a row that a replica fails before it is replaced."""


class ReplicaController(Actor):
    """Owns the replicas of a service. Callers get the list of replicas from it, and send them requests directly."""

    def __init__(self, blueprint: Blueprint) -> None:
        self._blueprint = blueprint
        self._options = blueprint.options
        self._replicas: dict[int, Replica | None] = {}
        """Replicas by number. None: the replica has died, and its successor has not started yet."""
        self._subscribers = Subscribers()
        self._restarts: Counter[int] = Counter()
        self._lives: Counter[int] = Counter()
        self._deaths: Counter[int] = Counter()
        """How many times in a row a replica died before it was stable, while no other came up; by number."""
        self._begun_s: dict[int, float] = {}
        """When the present replica of a number began to start."""
        self._came_up_s: dict[int, float] = {}
        """When a replica of a number last came up."""
        self._order = asyncio.Lock()
        """Held during a requested change (scale, drain, rolling fanout), so that changes happen one after another."""
        self._me = context().actor_instance
        self._loop = asyncio.get_running_loop()
        self._counted_s = float("-inf")
        self._tasks: dict[asyncio.Task[None], None] = {}
        for number in range(self._options.num_replicas):
            self._begin(number)
        status_providers.report_table(f"service {blueprint.service}", self._overview)
        if self._options.health is not None:
            self._run(self._check_for_ever(self._options.health))

    # For callers

    @concurrent_endpoint(explicit_response_port=True)
    async def watch(self, port: Port[ReplicaTable], caller: str, seen: int, tallies: dict[int, Tally]) -> None:
        """Answer with the table of replicas once it is newer than what the caller has seen, and note its counts."""
        if self._subscribers.listen(port, caller, seen, tallies):
            port.send(self._table())

    @concurrent_endpoint
    async def tell(self, caller: str, tallies: dict[int, Tally]) -> None:
        """Note what a caller has counted."""
        self._subscribers.note(caller, tallies)

    @concurrent_endpoint
    async def replaces(self, entry: int) -> bool:
        """Whether the replica with this entry, which a caller has lost, has been replaced or will be in a moment."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DOUBT_S):
                await self._until(lambda: not self._has(entry))
                return True
        return False

    @concurrent_endpoint
    async def up(self) -> None:
        """Answer when all replicas are up."""
        await self._until(lambda: all(self._is_up(number) for number in self._replicas))

    @concurrent_endpoint
    async def scale(self, count: int) -> None:
        """Change the number of replicas. When this answers, new ones are up, or the highest numbers drained."""
        async with self._order:
            added = [number for number in range(count) if number not in self._replicas]
            surplus = [number for number in sorted(self._replicas) if number >= count]
            for number in added:
                self._deaths[number] = 0
                self._begin(number)
            await asyncio.gather(*(self._remove(number) for number in surplus))
            await self._until(lambda: all(self._is_up(number) for number in added))
            await self._subscribers.know(self._subscribers.version)

    @concurrent_endpoint
    async def drain(self, number: int) -> None:
        """Drain a replica, and start another one in its place, which is up when this answers."""
        async with self._order:
            if number not in self._replicas:
                raise IndexError(f"{self._blueprint.service} has no replica {number}")
            await self._wind_up(number)
            self._begin(number)
            self._publish()
            await self._until(lambda: self._is_up(number))
            await self._subscribers.know(self._subscribers.version)

    @concurrent_endpoint
    async def roll(
        self, method: str, width: int, is_skipping: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        """Call every replica in the order of their numbers, ``width`` at a time, while the others take the requests.

        With ``is_skipping``, replicas that are not up are left out.
        """
        async with self._order:
            slots = asyncio.Semaphore(width)

            async def one(number: int) -> Any:
                return await self._update(number, slots, method, args, kwargs, is_skipped=is_skipping)

            results = await asyncio.gather(*map(one, sorted(self._replicas)), return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException):
                    raise result
            return [result for result in results if result is not _ABSENT]

    @concurrent_endpoint
    async def metrics(self) -> list[ReplicaMetrics]:
        """What is known of each replica, in the order of their numbers."""
        self._publish()  # makes every caller answer with its present counts
        await self._subscribers.know(self._subscribers.version)
        return [
            summary(slot.number, slot.state, self._restarts[slot.number], self._subscribers.tallies())
            for slot in self._table().slots
        ]

    @concurrent_endpoint
    async def finish(self) -> None:
        """Drain all replicas and stop."""
        async with self._order:
            await asyncio.gather(*(self._remove(number) for number in sorted(self._replicas)))
        self._cancel()
        self._me.stop()

    # Starts and ends of replicas

    async def __supervise__(self, failure: MeshFailure) -> bool:
        """Replace a replica that has died, unless its successors have died too often."""
        replica = next((each for each in self._replicas.values() if each and each.name == failure.mesh_name), None)
        if replica is None:
            return True  # that replica was given up earlier
        if not self._lose(replica, failure.root_cause().message):
            self._cancel()
            return False
        return True

    async def __cleanup__(self, error: Exception | None) -> None:
        """End the replicas that were starting when this actor ended."""
        status_providers.report_table(f"service {self._blueprint.service}", None)
        self._cancel()
        for replica in self._replicas.values():
            if replica is not None:
                await replica.end()

    def _begin(self, number: int, delay_s: float = 0.0) -> None:
        """Start a replica after ``delay_s``. Returns at once."""
        self._replicas[number] = None
        life = self._lives[number]
        self._lives[number] += 1
        self._run(self._bring_up(number, life, delay_s))

    async def _bring_up(self, number: int, life: int, delay_s: float) -> None:
        def is_obsolete() -> bool:
            return number not in self._replicas or self._lives[number] != life + 1

        await asyncio.sleep(delay_s)
        if is_obsolete():
            return  # the service was scaled down in the meantime
        self._begun_s[number] = time.monotonic()
        others = (each.host for each in self._replicas.values() if each is not None)
        host = choose_host(self._options.hosts, number, others)
        try:
            replica = await Replica.start(self._blueprint, number, life, host)
        except ActorError as error:
            self._me.abort(f"replica {number} of {self._blueprint.service}: {error.cause or error}")
            return
        except SupervisionError as error:  # its host is lost
            if not self._try_again(number, is_early=True):
                self._me.abort(f"replica {number} of {self._blueprint.service}: {error}")
            return
        if is_obsolete():
            await replica.end()
            return
        self._replicas[number] = replica
        self._publish()
        try:
            await replica.come_up()
        except SupervisionError:
            return  # its mesh fails, and this actor gets that failure
        except ControlError as error:
            if self._replicas.get(number) is replica and not self._lose(replica, f"setup failed: {error}"):
                self._me.abort(f"{replica.name} cannot be set up: {error}")
            return
        if replica.state is ReplicaState.STARTING:
            replica.state = ReplicaState.READY
            self._came_up_s[number] = time.monotonic()
            self._publish()

    def _lose(self, replica: Replica, reason: str) -> bool:
        """Replace a replica. False: its successors have died too often."""
        number = replica.number
        _log.warning("%s is being replaced: %s", replica.name, reason)
        self._run(replica.stop(_GRACE_S))
        if replica.state is ReplicaState.DRAINING:
            self._replicas[number] = None  # so that `_wind_up` continues
            self._publish()
            return True
        return self._try_again(number, is_early=not replica.has_been_of_use(self._options.stable_s))

    def _try_again(self, number: int, *, is_early: bool) -> bool:
        """Start a replica again. False: it has died too often before it was stable."""
        options = self._options
        begun_s = self._begun_s[number]
        others_came_up = any(at > begun_s for other, at in self._came_up_s.items() if other != number)
        # If other replicas came up in the meantime, the class and the machine are not at fault.
        deaths = self._deaths[number] = self._deaths[number] + 1 if is_early and not others_came_up else 0
        if deaths > options.max_restarts:
            return False
        self._restarts[number] += 1
        delay_s = min(options.backoff_s * 2 ** (deaths - 2), _LONGEST_BACKOFF_S) if deaths > 1 else 0.0
        self._begin(number, delay_s)
        self._publish()
        return True

    async def _remove(self, number: int) -> None:
        """Let a replica finish its sessions and requests, and end it without a successor."""
        await self._wind_up(number)
        del self._replicas[number]
        self._publish()

    async def _wind_up(self, number: int) -> None:
        """Let a replica finish its sessions and requests, and end it."""
        replica = self._replicas[number]
        if replica is not None:
            replica.state = ReplicaState.DRAINING
            self._publish()
            deadline = time.monotonic() + self._options.drain_timeout_s
            await self._subscribers.know(self._subscribers.version)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(deadline - time.monotonic(), 0)):
                    await self._until(lambda: not self._subscribers.sessions_of(number))
            if self._replicas.get(number) is replica:
                await replica.stop(max(deadline - time.monotonic(), 0))

    async def _update(
        self,
        number: int,
        slots: asyncio.Semaphore,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_skipped: bool,
    ) -> Any:
        """Call a replica once it is up and there is a slot. If it dies, call its successor if that is safe."""
        while True:
            if not is_skipped:
                await self._until(lambda: self._is_up(number))  # other replicas may use the slot in the meantime
            async with slots:
                if self._is_up(number):
                    result = await self._update_one(number, method, args, kwargs, is_skipped=is_skipped)
                    if result is not _AGAIN:
                        return result
                elif is_skipped:
                    return _ABSENT

    async def _update_one(
        self, number: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_skipped: bool
    ) -> Any:
        """Call a replica that is up; it gets no routed requests during the call."""
        replica = self._replicas[number]
        assert replica is not None  # it is up
        replica.state = ReplicaState.UPDATING
        self._publish()
        await self._subscribers.know(self._subscribers.version)
        try:
            return await replica.call(method, args, kwargs)
        except SupervisionError as error:
            if error.failure is None and self._replicas.get(number) is replica:
                raise  # the replica lives, and has only dropped its answer
            await self._until(lambda: self._replicas.get(number) is not replica)
            if is_skipped:
                return _ABSENT
            if error.is_unhandled or getattr(replica.actors, method).spec.is_idempotent:
                return _AGAIN
            message = f"replica {number} of {self._blueprint.service} died in {method}: {error}"
            raise ReplicaLostError(self._blueprint.service, number, message, error.failure) from error
        finally:
            if replica.state is ReplicaState.UPDATING:
                replica.state = ReplicaState.READY
                self._publish()

    # Health

    async def _check_for_ever(self, endpoint: str) -> None:
        while True:
            await asyncio.sleep(self._options.health_interval_s)
            checked = (ReplicaState.READY, ReplicaState.UNHEALTHY)
            replicas = [each for each in self._replicas.values() if each is not None and each.state in checked]
            await asyncio.gather(*(self._check(replica, endpoint) for replica in replicas))

    async def _check(self, replica: Replica, endpoint: str) -> None:
        try:
            complaint = await replica.check(endpoint, self._options.health_timeout_s)
        except SupervisionError:
            return  # its mesh fails, and this actor gets that failure
        if self._replicas.get(replica.number) is not replica:
            return
        replica.misses = replica.misses + 1 if complaint else 0
        if replica.misses >= _MISSES:
            message = f"{replica.name} failed {_MISSES} health checks in a row: {complaint}"
            if not self._lose(replica, message):
                self._me.abort(message)
        elif replica.state in (ReplicaState.READY, ReplicaState.UNHEALTHY):
            state = ReplicaState.UNHEALTHY if complaint else ReplicaState.READY
            if state is not replica.state:
                replica.state = state
                self._publish()

    # Used by the parts above

    def _is_up(self, number: int) -> bool:
        replica = self._replicas.get(number)
        return replica is not None and replica.state is ReplicaState.READY

    def _has(self, entry: int) -> bool:
        return any(replica is not None and replica.entry.uid == entry for replica in self._replicas.values())

    def _table(self) -> ReplicaTable:
        return ReplicaTable(
            self._subscribers.version,
            tuple(
                ReplicaSlot(number, replica.state, replica.entry, replica.begins)
                if replica
                else ReplicaSlot(number, ReplicaState.DOWN, None)
                for number, replica in sorted(self._replicas.items())
            ),
        )

    def _overview(self) -> status_providers.Table:
        """The replicas, for people who watch the job; from any thread. Counts are as last reported by callers."""
        now_s = time.monotonic()
        if now_s - self._counted_s >= _COUNTS_INTERVAL_S:
            self._counted_s = now_s
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._publish)  # callers answer it with their present counts
        tallies = self._subscribers.tallies()
        rows = []
        for number, replica in sorted(self._replicas.copy().items()):
            state = ReplicaState.DOWN if replica is None else replica.state
            of = summary(number, state, self._restarts[number], tallies)
            counts = (of.restarts, of.outstanding, of.done, of.errors, of.lost)
            rows.append((number, state.value, *counts, round(1e3 * of.mean_s, 3), round(1e3 * of.longest_s, 3)))
        return status_providers.Table(f"Service {self._blueprint.service}", _COLUMNS, rows)

    def _publish(self) -> None:
        """Send every caller the present state of the service."""
        self._subscribers.publish(self._table)

    async def _until(self, condition: Callable[[], bool]) -> None:
        await self._subscribers.until(condition)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._has_ended)

    def _has_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._me.abort(f"service {self._blueprint.service}: {type(error).__name__}: {error}")

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()


def pick(number: int, lives: list[bool], load: list[int]) -> int:
    """The index of a host: the replica's own, by its number, or while that is lost, the one with the fewest replicas.

    ``lives`` says for each host that it is not known to be lost, ``load`` how many replicas it has.
    """
    count = len(lives)
    own = number % count
    alive = [(own + step) % count for step in range(count) if lives[(own + step) % count]]
    # If all are lost, its own is as good as any: the start fails, and counts as a failed start.
    return own if not alive or lives[own] else min(alive, key=load.__getitem__)


def choose_host(hosts: HostMesh | None, number: int, others: Iterable[int]) -> tuple[int, HostMesh]:
    """The host for a replica: its index among ``hosts`` (None: this process' own), and the host as attached last.

    ``others`` are the indices of the hosts that the other replicas are on.
    """
    if hosts is None or not hosts.names:
        return 0, this_host()
    hosts = hosts.latest()
    lives = hosts.alive()
    load = [0] * len(lives)
    for index in others:
        load[index] += 1
    index = pick(number, lives, load)
    return index, hosts.slice(hosts=index)
