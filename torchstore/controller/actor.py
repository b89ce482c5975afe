"""The store's controller: one actor per store that knows which versions exist and where they are stored.

No tensor passes through it (except values of a few KiB). A publisher calls it once per version, a reader once, plus one
message without an answer when it is done. A request that has to wait (for a version that does not exist yet, for
readers to leave) leaves its response port here, and gets its answer when that happens.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from typing import Any

from skipper.control import Actor, Port, ProcMesh, concurrent_endpoint, endpoint
from skipper.control.model.failure import MeshFailure
from skipper.control.runtime.status_providers import report_table
from skipper.dataplane import RDMABuffer
from skipper.torchstore.algebra.copies import check_room
from skipper.torchstore.controller.journal import Journal, JournalAddress
from skipper.torchstore.controller.meta import describe_version, overview, waits
from skipper.torchstore.controller.reading import PendingAnswers, Reading
from skipper.torchstore.controller.recorder import Recorder
from skipper.torchstore.controller.state import Command, Effects
from skipper.torchstore.controller.succession import START_TIMEOUT_S, Succession
from skipper.torchstore.controller.volumes import Volumes
from skipper.torchstore.errors import JournalError, KeyNotFoundError, StoreNotInitializedError, StrategyError
from skipper.torchstore.protocol.batches import BatchGrant, BatchPublication
from skipper.torchstore.protocol.messages import (
    CLIENTS_BITS,
    Grant,
    Publication,
    Published,
    RequestNumber,
    Retired,
    Selector,
    Share,
    StaleClientError,
    StoreInfo,
    StoreSettings,
    Successor,
    Wanted,
)
from skipper.torchstore.protocol.meta import ValueMeta
from skipper.torchstore.protocol.strategy import TorchStoreStrategy
from skipper.torchstore.support.process import DeathNotice, ProcessId, this_process
from skipper.torchstore.tensors.tiles import TensorsTiles

_log = logging.getLogger("skipper.torchstore")

_LOCK_TIMEOUT_S = 10.0
_LATER_S = 1.0


class StoreController(Actor):
    """Keeps the index of one store, its volumes, and the requests that wait for something.

    In a store with a journal, the controller with the store's name does none of that. It starts others, one after the
    other, in processes of their own (`torchstore.controller.succession`), and says which of them is active.
    """

    def __init__(self, store_name: str) -> None:
        self._store_name = store_name
        self._volumes: Volumes | None = None
        self._settings = StoreSettings()
        self._recorder = Recorder(store_name)
        self._waiting = PendingAnswers()
        self._reading = Reading(self._recorder, self._waiting)
        self._watch = DeathNotice(self._process_died)
        self._part = f"torchstore {store_name}"
        self._succession: Succession | None = None
        self._stores = count(1)
        self._lives = count()

    async def __cleanup__(self, error: Exception | None) -> None:
        """Stop reporting."""
        for part in (self._part, f"{self._part} waits"):
            report_table(part, None)

    def __supervise__(self, failure: MeshFailure) -> bool:
        """Continue: users of a dead volume are informed, and a dead controller gets a successor."""
        if self._succession is not None:
            self._succession.supervise(failure)
        return True

    # The store ------------------------------------------------------------------------------------------

    @endpoint
    async def init(
        self,
        num_storage_volumes: int,
        strategy: TorchStoreStrategy,
        mesh: ProcMesh | None,
        volume_nbytes: int | None,
        settings: StoreSettings,
    ) -> None:
        """Start the volumes. A second call without a shutdown between is an error.

        Raises:
            StrategyError: The volumes have equal names (too few hosts or ranks for that many volumes), or there are
                fewer volumes than copies; or one is in the controller's process, and there is to be a journal.
            ControllerLostError: There is to be a journal, and no controller could be started.
        """
        if self._volumes is not None:
            raise StrategyError(f"the store {self._store_name!r} is already initialized; shut it down first")
        settings = replace(settings, first_client=next(self._stores) << CLIENTS_BITS)
        volumes = await Volumes.start(
            self._store_name, num_storage_volumes, strategy, mesh, volume_nbytes, apart=settings.journal
        )
        try:
            check_room(settings.copies, len(volumes.actors))
            if settings.journal:
                self._succession = Succession(StoreController, self._store_name, volumes, settings, self._lives)
                await self._succession.after(-1, START_TIMEOUT_S)
        except BaseException:
            succession, self._succession = self._succession, None
            if succession is not None:
                await succession.end()
            await volumes.stop()
            raise
        self._volumes = volumes
        if self._succession is None:
            self._begin(settings)
            self._serve(volumes, settings)

    @endpoint
    async def succeed(self, volumes: Volumes, settings: StoreSettings, journal: JournalAddress) -> ProcessId:
        """Continue where the earlier controllers ended, in a store with a journal. Returns this process.

        Raises:
            JournalError: The journal cannot be read.
        """
        self._volumes = volumes
        self._begin(settings)
        self._recorder.open(Journal(journal, _LOCK_TIMEOUT_S))
        self._serve(volumes, settings)
        for process in self._recorder.state.members.processes():
            self._watch.add(process, self._recorder.state.homes.get(process))
        for effects in self._recorder.owed():
            self._tell(effects)
        return this_process()

    def _begin(self, settings: StoreSettings) -> None:
        """Set the state of a new store."""
        self._recorder.state.index.keep = settings.keep_versions
        self._recorder.state.members.begin(settings.first_client)

    def _serve(self, volumes: Volumes, settings: StoreSettings) -> None:
        self._settings = settings
        self._recorder.begin(self._tell, self._reading.repost)
        for name, process in volumes.processes.items():
            self._watch.add(process, volumes.homes[name])
        report_table(self._part, lambda: overview(self._store_name, self._recorder.state.index))
        report_table(f"{self._part} waits", lambda: waits(self._store_name, self._waiting.waiting()))

    @concurrent_endpoint
    async def info(self, process: ProcessId, procs: ProcMesh) -> StoreInfo:
        """Register a client, whose process `control` knows as ``procs``; the store learns from now on when it dies."""
        if self._succession is not None and self._volumes is not None:
            return await self._succession.welcome(process, procs)
        volumes = self._initialized()
        self._watch.add(process, procs)
        number = self._recorder.do(Command("welcome", (process, procs)))
        return StoreInfo(
            volumes.strategy,
            volumes.actors,
            volumes.processes,
            number,
            self._settings.checksum,
            this_process(),
            self._settings.copies,
            self._settings.certify,
        )

    @concurrent_endpoint
    async def successor(self, life: int, timeout: float) -> Successor:
        """The controller that has replaced the one with this number, in a store with a journal.

        If that one still exists after a while, it is the answer: it was only unreachable.

        Raises:
            ControllerLostError: There will be none.
            StaleClientError: Its store was shut down, and is another one now.
            StoreTimeoutError: None was there in time.
        """
        if self._volumes is None:
            raise StoreNotInitializedError(self._store_name)
        if self._succession is None:
            raise self._stale()
        return await self._succession.after(life, timeout)

    @endpoint
    async def return_to(self, client: int, leases: frozenset[tuple[str, int]], batches: frozenset[int]) -> None:
        """Take over a client of an earlier controller: it holds these leases, and no others.

        Raises:
            StaleClientError: It belongs to a store that has been shut down.
        """
        process = self._process_of(client)
        for command in self._recorder.abandoned(process, leases, batches):
            self._recorder.do(command)
        self._waiting.wake()

    @endpoint
    async def check(self, client: int) -> None:
        """Raise StaleClientError for a client of a store that has been shut down."""
        self._process_of(client)

    @endpoint
    async def teardown(self) -> None:
        """Forget every key, free all memory and stop the volumes."""
        volumes, self._volumes = self._volumes, None
        succession, self._succession = self._succession, None
        self._leave()
        if succession is not None:
            await succession.end()
        if volumes is not None:
            await volumes.stop()

    @endpoint
    async def retire(self) -> None:
        """Forget every key and answer all waiting requests: the actor that started this one shuts the store down."""
        self._volumes = None
        self._leave()

    def _leave(self) -> None:
        """Answer all waiting requests with an error, and forget the store."""
        for part in (self._part, f"{self._part} waits"):
            report_table(part, None)
        self._waiting.dismiss_all(StoreNotInitializedError(self._store_name))
        self._watch.close()
        self._reading.board.close()
        self._recorder.close()

    # Publishing -----------------------------------------------------------------------------------------

    @endpoint
    async def publish(
        self, client: int, publications: tuple[Publication | BatchPublication, ...], request: RequestNumber
    ) -> tuple[Published, ...]:
        """Add contributions, in order; each may complete a version, which then becomes visible at once.

        A ``request`` with a number other than 0 is done only once, however often it comes; here and below.

        Raises:
            UnknownIdError: A publication contains only an id, and that is not remembered. Nothing was added.
            ArenaFreedError: A publication's arena is gone. Nothing was added.
            VersionExistsError, LateShareError, OutOfStepError, ShareMismatchError, ReplicaMismatchError: See
                `History.contribute`.
        """
        answers: tuple[Published, ...] = self._once(client, request, "publish", time.monotonic(), client, publications)
        return answers

    @endpoint
    async def reserve(self, client: int, key: str, request: RequestNumber) -> int:
        """The number of a new version of a key, for publishers that agree on it among themselves."""
        return int(self._once(client, request, "reserve", client, key))

    @endpoint
    async def put_inline(self, client: int, key: str, value: bytes, request: int, oldest: int) -> int:
        """Add a whole small value as the next version of a key. Returns its number.

        The two numbers are those of a `RequestNumber`: all arguments are plain, like those of `acquire`.
        """
        return int(self._once(client, (request, oldest), "put_inline", client, key, value))

    @endpoint
    async def reclaim(self, client: int, request: RequestNumber) -> tuple[Retired, ...]:
        """Memory of this client's process that was retired since its last publication."""
        news: tuple[Retired, ...] = self._once(client, request, "reclaim", client)
        return news

    @endpoint(explicit_response_port=True)
    async def make_room(
        self, port: Port[tuple[int, tuple[str, ...]]], client: int, volume: str, since: int, timeout: float
    ) -> None:
        """Answer when arenas of a full volume have been freed, with what `StoreState.make_room` returns.

        Raises:
            StoreTimeoutError: Nothing could be freed for ``timeout`` seconds.
        """

        def attempt() -> tuple[int, tuple[str, ...]] | None:
            self._process_of(client)
            freed: tuple[int, tuple[str, ...]] | None = self._recorder.attempt(
                Command("make_room", (client, volume, since)), bool
            )
            return freed

        self._waiting.answer(
            port,
            attempt,
            timeout,
            lambda: f"volume {volume!r} is full of versions that are being read or are the newest of their keys",
        )

    # Reading --------------------------------------------------------------------------------------------

    @endpoint(explicit_response_port=True)
    async def acquire(
        self,
        port: Port[Grant | bytes],
        client: int,
        key: str,
        exact: int | None,
        newer_than: int | None,
        known: str,
        timeout: float,
    ) -> None:
        """Grant one version of one key to a client; answers when it is ready.

        All arguments are plain, and so is the answer for a value that travels inline (`board.pack_answer`): `control`
        moves those without a step in Python, which is most of the cost of a small get. A reader of the newest version
        of such a value also learns where it will find the next ones.

        Raises:
            KeyNotFoundError: The key, or that version of it, does not exist and will not come.
            StoreTimeoutError: The awaited version did not come in ``timeout`` seconds.
        """
        self._reading.grant(port, client, key, Selector(exact, newer_than), tuple(known.split()), timeout)

    @endpoint
    async def board(self, client: int, page: int) -> RDMABuffer:
        """A page of the board, for readers of this host."""
        self._process_of(client)
        return self._reading.board.share(page)

    @endpoint(explicit_response_port=True)
    async def acquire_batch(
        self, port: Port[tuple[Grant, ...]], client: int, wanted: tuple[Wanted, ...], timeout: float
    ) -> None:
        """`acquire` for several keys: all of them or none; answers when the last of them is ready."""
        self._reading.grant_all(port, client, wanted, timeout)

    @endpoint(explicit_response_port=True)
    async def acquire_values(self, port: Port[BatchGrant], client: int, keys: tuple[str, ...], timeout: float) -> None:
        """`acquire` for the newest versions of many plain values: all of them or none."""
        self._reading.grant_values(port, client, keys, timeout)

    @endpoint
    async def release(self, leases: tuple[tuple[str, int], ...], batch: int = 0) -> None:
        """Give back leases, and those of a batch; there is no answer."""
        self._do("release", leases, batch)

    @endpoint
    async def finish(self, client: int, key: str, lease: int, share: Share | None, failed: bool) -> None:
        """Give back the lease of a reader that takes part in peer reads; see `PeerReadScheduler.finish`."""
        self._do("finish", client, key, lease, share, failed)

    @endpoint
    async def withdraw(self, client: int, key: str) -> None:
        """Note that a reader overwrites the copy that it has offered; there is no answer."""
        self._do("withdraw", client, key)

    # Taking back ----------------------------------------------------------------------------------------

    @endpoint(explicit_response_port=True)
    async def fence(self, port: Port[bool], client: int, key: str, close: bool, timeout: float) -> None:
        """Answer when nobody reads from this client's process any more; with ``close``, nobody may begin to.

        Raises:
            StoreTimeoutError: Readers are still reading after ``timeout`` seconds; the message names them.
        """
        history = self._recorder.state.index.get(key)
        if close and history is not None:
            self._recorder.do(Command("close", (client, key)))

        def attempt() -> bool | None:
            who = self._process_of(client)
            return True if history is None else history.is_drained(who) or None

        def waited_for() -> str:
            readers = history.readers(self._process_of(client)) if history is not None else ()
            return f"{key!r} is still being read by {', '.join(map(str, dict.fromkeys(readers)))}"

        self._waiting.answer(port, attempt, timeout, waited_for)

    @endpoint
    async def rollback(self, client: int, key: str, version: int, request: RequestNumber) -> None:
        """See `Index.rollback`."""
        self._once(client, request, "rollback", key, version)

    @endpoint
    async def delete(self, client: int, keys: tuple[str, ...], missing_ok: bool, request: RequestNumber) -> None:
        """See `Index.delete`."""
        self._once(client, request, "delete", keys, missing_ok)

    # Listing --------------------------------------------------------------------------------------------

    @endpoint
    async def keys(self, prefix: str | None) -> list[str]:
        """See `Index.keys`."""
        self._initialized()
        return self._recorder.state.index.keys(prefix)

    @endpoint
    async def exists(self, key: str) -> bool:
        """See `Index.exists`."""
        self._initialized()
        return self._recorder.state.index.exists(key)

    @endpoint
    async def exist(self, keys: tuple[str, ...]) -> tuple[bool, ...]:
        """`exists` of each of them."""
        self._initialized()
        return tuple(map(self._recorder.state.index.exists, keys))

    @endpoint
    async def versions(self, key: str) -> tuple[int, ...]:
        """The readable versions of a key, oldest first."""
        self._initialized()
        history = self._recorder.state.index.get(key)
        return history.readable() if history is not None else ()

    @endpoint
    async def meta(self, key: str) -> ValueMeta:
        """The metadata of the newest readable version of a key.

        Raises:
            KeyNotFoundError: There is none.
        """
        self._initialized()
        found = self._recorder.state.index.find(Wanted(key))
        if found is None:  # direct mode: withdrawn at the moment
            raise KeyNotFoundError(key, f"no version of {key!r} can be read at the moment")
        history, version, item = found
        return describe_version(key, version, history.readable(), item)

    @endpoint
    async def certified(self, key: str, version: int | None) -> tuple[int, Mapping[int, TensorsTiles]]:
        """The publishers' certificates for the tiles of a version, by their ranks, and the version's number.

        For the latest certified versions it exists even after their bytes are gone. None is the newest version.

        Raises:
            KeyNotFoundError: There is no such version.
            NotCertifiedError: At least some ranks put it without a certificate.
        """
        self._initialized()
        history = self._recorder.state.index.get(key)
        if history is None:
            raise KeyNotFoundError(key)
        return history.certified(version)

    @endpoint
    async def count_leases(self) -> int:
        """How many reads are in progress."""
        self._initialized()
        return sum(len(single) + len(batches) for single, batches in self._recorder.state.leases().values())

    # Housekeeping ---------------------------------------------------------------------------------------

    def _once(self, client: int, request: RequestNumber, name: str, *arguments: Any) -> Any:
        """Change the state for a client, and answer requests whose wait is over."""
        self._initialized()
        try:
            return self._recorder.do(Command(name, arguments, client, *request))
        finally:
            self._waiting.wake()

    def _do(self, name: str, *arguments: Any) -> None:
        """The same without a client that would ask again; retried later if there is no memory for the journal now."""
        try:
            self._recorder.do(Command(name, arguments))
        except JournalError as error:
            _log.warning("%s will be done later: %s", name, error)
            asyncio.get_running_loop().call_later(_LATER_S, self._do, name, *arguments)
        self._waiting.wake()

    def _process_of(self, client: int) -> ProcessId:
        self._initialized()
        return self._recorder.state.members.process_of(client)

    def _initialized(self) -> Volumes:
        if self._volumes is None:
            raise StoreNotInitializedError(self._store_name)
        if self._succession is not None:
            raise self._stale()
        return self._volumes

    def _stale(self) -> StaleClientError:
        return StaleClientError(f"this client is of an earlier store {self._store_name!r}")

    def _tell(self, effects: Effects) -> None:
        """Tell the volumes what has been recorded."""
        if self._volumes is not None:
            for volume, arenas in effects.freed.items():
                self._volumes.free(volume, tuple(arenas))
            for dead in effects.dead:
                self._volumes.free_writer(dead.process, dead.kept, dead.clients_below)

    def _process_died(self, process: ProcessId) -> None:
        volumes = self._volumes.living_in(process) if self._volumes is not None else []
        self._do("process_died", process, tuple(volumes))
