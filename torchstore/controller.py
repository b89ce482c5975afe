"""The store's controller: one actor per store that knows which versions there are and where they lie.

No tensor passes through it (values of a few KiB excepted). A publisher calls it once per version, a reader
once, plus one message without an answer when it is done. Whoever has to wait (for a version that is not
there yet, for readers to leave) leaves its response port here and is answered when it happens.
"""

from __future__ import annotations

import time
from dataclasses import replace

from control import Actor, Port, ProcMesh, endpoint
from control.runtime.tables import report_table
from dataplane import RDMABuffer
from torchstore.batches import BatchGrant, BatchPublication
from torchstore.budget import make_room
from torchstore.copies import check_room
from torchstore.errors import KeyNotFoundError, StoreError, StoreNotInitializedError, StrategyError
from torchstore.index import Index
from torchstore.ledger import Ledger
from torchstore.manifest import Part
from torchstore.members import KnownRecords, Members
from torchstore.messages import (
    ArenaFreedError,
    Grant,
    Publication,
    Published,
    Retired,
    Selector,
    Share,
    StoreInfo,
    Wanted,
)
from torchstore.meta import ValueMeta, describe_version
from torchstore.origin import ALONE
from torchstore.overview import overview
from torchstore.process import ProcessId, this_process
from torchstore.reading import Reading
from torchstore.shared_arenas import SharedArenas
from torchstore.sharing import BatchDesk
from torchstore.strategy import TorchStoreStrategy
from torchstore.version import Contribution
from torchstore.volumes import Volumes
from torchstore.waiting import WaitingRoom
from torchstore.watch import ProcessWatch


class StoreController(Actor):
    """Keeps the index of one store, its volumes, and who waits for what.

    Args:
        store_name: Named in errors.
    """

    def __init__(self, store_name: str) -> None:
        self._store_name = store_name
        self._volumes: Volumes | None = None
        self._checksum = False
        self._copies = 1
        self._ledger = Ledger(self._free)
        self._shared = SharedArenas(self._ledger, self._free_all)
        self._index = Index(self._shared.idle, self._shared.gone, lambda history: self._reading.repost(history))
        self._known = KnownRecords()
        self._batches = BatchDesk(self._index, self._known, self._ledger, self._shared)
        self._members = Members(store_name)
        self._waiting = WaitingRoom(self._shared.give_back)
        self._reading = Reading(self._index, self._known, self._waiting, self._process_of, self._batches)
        self._watch = ProcessWatch(self._process_died)
        self._part = f"torchstore {store_name}"

    async def __cleanup__(self, error: Exception | None) -> None:
        """Report no more."""
        report_table(self._part, None)

    def __supervise__(self, failure: object) -> bool:
        """A volume that dies is reported to those who use it; it does not take the store down."""
        return True

    # The store ------------------------------------------------------------------------------------------

    @endpoint
    async def init(
        self,
        num_storage_volumes: int,
        strategy: TorchStoreStrategy,
        mesh: ProcMesh | None,
        keep_versions: int,
        volume_nbytes: int | None,
        checksum: bool,
        copies: int = 1,
    ) -> None:
        """Start the volumes. Doing it twice without a shutdown between is an error.

        Raises:
            StrategyError: The volumes have equal names (too few hosts or ranks for that many volumes), or there are
                fewer volumes than copies.
        """
        if self._volumes is not None:
            raise StrategyError(f"the store {self._store_name!r} is initialized already; shut it down first")
        volumes = await Volumes.start(self._store_name, num_storage_volumes, strategy, mesh, volume_nbytes)
        try:
            check_room(copies, len(volumes.actors))
        except StrategyError:
            await volumes.stop()
            raise
        for name, process in volumes.processes.items():
            self._watch.add(process, volumes.homes[name])
        self._volumes = volumes
        report_table(self._part, lambda: overview(self._store_name, self._index))
        self._index.keep = keep_versions
        self._checksum = checksum
        self._copies = copies

    @endpoint
    async def info(self, process: ProcessId, procs: ProcMesh) -> StoreInfo:
        """Welcome a client, whose process control knows as ``procs``. The store knows from here on when that dies."""
        volumes = self._initialized()
        self._watch.add(process, procs)
        number = self._members.welcome(process)
        return StoreInfo(
            volumes.strategy,
            volumes.actors,
            volumes.processes,
            number,
            self._checksum,
            this_process(),
            self._copies,
        )

    @endpoint
    async def check(self, client: int) -> None:
        """Raise StaleClientError for a client of a store that was shut down meanwhile."""
        self._process_of(client)

    @endpoint(explicit_response_port=True)
    async def wait_for_teardown(self, port: Port[bool], client: int, timeout: float) -> None:
        """Answer when the store that welcomed this client has been shut down."""

        def attempt() -> bool | None:
            return True if self._members.find(client) is None else None

        self._waiting.answer(port, attempt, timeout, lambda: "rank 0 has not shut the store down")

    @endpoint
    async def teardown(self) -> None:
        """Forget every key, free all memory and stop the volumes."""
        volumes, self._volumes = self._volumes, None
        report_table(self._part, None)
        self._waiting.dismiss_all(StoreNotInitializedError(self._store_name))
        self._watch.close()
        self._reading.board.close()
        self._index.clear()
        self._ledger.clear()
        self._shared.clear()
        self._batches.clear()
        self._known.clear()
        self._members.clear()
        if volumes is not None:
            await volumes.stop()

    # Publishing -----------------------------------------------------------------------------------------

    @endpoint
    async def publish(
        self, client: int, publications: tuple[Publication | BatchPublication, ...]
    ) -> tuple[Published, ...]:
        """Add contributions, in order; each may complete a version, which then becomes visible at once.

        Raises:
            UnknownIdError: A publication holds only an id, and it is not remembered. Nothing was added.
            ArenaFreedError: A publication's arena is gone. Nothing was added.
            VersionExistsError, LateShareError, OutOfStepError, ShareMismatchError, ReplicaMismatchError: See
                `History.contribute`.
        """
        writer = self._process_of(client)
        plain = [p for p in publications if isinstance(p, Publication)]
        resolved = [(publication, self._contribution(publication)) for publication in plain]
        batches = [self._batches.contributions(p) for p in publications if isinstance(p, BatchPublication)]
        resolved.sort(key=lambda pair: pair[0].turn == ALONE)  # only shares can be refused: before all else is visible
        answers: list[Published] = []
        for at, (publication, contribution) in enumerate(resolved):
            try:
                answers.append(
                    self._index.contribute(publication.key, contribution, publication.version, keep=publication.keep)
                )
            except StoreError:
                for _, unused in resolved[at + 1 :]:
                    for binding in unused.holders:
                        self._shared.idle(unused.writer, binding)
                raise
        answers += [Published(self._batches.add(batch), True) for batch in batches]
        if answers:
            answers[-1] = replace(answers[-1], retired=self._ledger.news_for(writer))
        self._waiting.wake()
        return tuple(answers)

    @endpoint
    async def reserve(self, client: int, key: str) -> int:
        """The number of a new version of a key, for publishers that agree about it among themselves."""
        self._process_of(client)
        number = self._index.reserve(key)
        self._waiting.wake()
        return number

    @endpoint
    async def put_inline(self, client: int, key: str, value: bytes) -> int:
        """Add a whole small value as the next version of a key. Returns its number."""
        contribution = Contribution(self._process_of(client), Part(), None, None, inline=value)
        published = self._index.contribute(key, contribution, None)
        self._waiting.wake()
        return published.version

    @endpoint
    async def reclaim(self, client: int) -> tuple[Retired, ...]:
        """Memory of this client's process that was retired since its last publication."""
        return self._ledger.news_for(self._process_of(client))

    @endpoint(explicit_response_port=True)
    async def make_room(
        self, port: Port[tuple[int, tuple[str, ...]]], client: int, volume: str, since: int, timeout: float
    ) -> None:
        """Answer when arenas of a full volume have been freed, with the ledger's clock and their ids: see `make_room`.

        Raises:
            StoreTimeoutError: There was nothing to free for ``timeout`` seconds.
        """

        def attempt() -> tuple[int, tuple[str, ...]] | None:
            self._process_of(client)
            return make_room(self._ledger, self._index, self._shared, volume, since)

        self._waiting.answer(
            port,
            attempt,
            timeout,
            lambda: f"volume {volume!r} is full of versions that are being read or are the newest of their keys",
        )

    def _contribution(self, publication: Publication) -> Contribution:
        manifest, binding = self._known.manifest(publication.manifest), self._known.binding(publication.binding)
        copies = self._known.bindings(publication.copies)
        for holder in (binding, *copies) if binding is not None else ():
            if self._ledger.is_freed(holder):
                raise ArenaFreedError(holder.id)
            self._ledger.in_use(holder)
        return Contribution.of(publication, manifest, binding, time.monotonic(), copies)

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

        All arguments are plain, and so is the answer for a value that travels inline (`board.pack_answer`): control
        moves those without a step in Python, which is most of the cost of a small get. Who asks for the newest
        version of such a value is told where it will find the next ones.

        Raises:
            KeyNotFoundError: The key, or that version of it, does not exist and is not waited for.
            StoreTimeoutError: A version that was waited for did not come in ``timeout`` seconds.
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
        """Give leases back, and those of a batch; nobody waits for an answer."""
        self._reading.release(leases, batch)

    @endpoint
    async def finish(self, client: int, key: str, lease: int, share: Share | None, failed: bool) -> None:
        """Give the lease of a reader back that takes part in feeding others; see `Offers.finish`."""
        offered = share if self._members.find(client) is not None else None
        self._reading.finish(key, lease, offered, failed=failed)

    @endpoint
    async def withdraw(self, client: int, key: str) -> None:
        """A reader overwrites the copy that it has offered; nobody waits for an answer."""
        history, process = self._index.get(key), self._members.find(client)
        if history is not None and process is not None:
            history.withdraw(process)
            self._waiting.wake()

    # Taking back ----------------------------------------------------------------------------------------

    @endpoint(explicit_response_port=True)
    async def fence(self, port: Port[bool], client: int, key: str, close: bool, timeout: float) -> None:
        """Answer when nobody reads from this client's process any more; with ``close`` nobody may begin to.

        Raises:
            StoreTimeoutError: Readers are still there after ``timeout`` seconds; the message names them.
        """
        publisher = self._members.find(client)
        history = self._index.get(key)
        if close and history is not None and publisher is not None:
            history.close(publisher)

        def attempt() -> bool | None:
            who = self._process_of(client)
            return True if history is None else history.is_drained(who) or None

        def waited_for() -> str:
            readers = history.readers(self._process_of(client)) if history is not None else ()
            return f"{key!r} is still being read by {', '.join(map(str, dict.fromkeys(readers)))}"

        self._waiting.answer(port, attempt, timeout, waited_for)

    @endpoint
    async def rollback(self, key: str, version: int) -> None:
        """See `Index.rollback`."""
        self._initialized()
        self._index.rollback(key, version)
        self._waiting.wake()

    @endpoint
    async def delete(self, keys: tuple[str, ...], missing_ok: bool) -> None:
        """See `Index.delete`."""
        self._initialized()
        self._index.delete(keys, missing_ok=missing_ok)
        self._waiting.wake()

    # Listing --------------------------------------------------------------------------------------------

    @endpoint
    async def keys(self, prefix: str | None) -> list[str]:
        """See `Index.keys`."""
        self._initialized()
        return self._index.keys(prefix)

    @endpoint
    async def exists(self, key: str) -> bool:
        """See `Index.exists`."""
        self._initialized()
        return self._index.exists(key)

    @endpoint
    async def exist(self, keys: tuple[str, ...]) -> tuple[bool, ...]:
        """`exists` of each of them."""
        self._initialized()
        return tuple(map(self._index.exists, keys))

    @endpoint
    async def versions(self, key: str) -> tuple[int, ...]:
        """The readable versions of a key, oldest first."""
        self._initialized()
        history = self._index.get(key)
        return history.readable() if history is not None else ()

    @endpoint
    async def meta(self, key: str) -> ValueMeta:
        """What the newest readable version of a key holds.

        Raises:
            KeyNotFoundError: There is none.
        """
        self._initialized()
        found = self._index.find(Wanted(key))
        if found is None:  # direct mode: taken back for the moment
            raise KeyNotFoundError(key, f"no version of {key!r} can be read at the moment")
        history, version, item = found
        return describe_version(key, version, history.readable(), item)

    # Housekeeping ---------------------------------------------------------------------------------------

    def _process_of(self, client: int) -> ProcessId:
        self._initialized()
        return self._members.process_of(client)

    def _initialized(self) -> Volumes:
        if self._volumes is None:
            raise StoreNotInitializedError(self._store_name)
        return self._volumes

    def _free(self, volume: str, arena: str) -> None:
        self._free_all(volume, (arena,))

    def _free_all(self, volume: str, arenas: tuple[str, ...]) -> None:
        if self._volumes is not None:
            self._volumes.free(volume, arenas)

    def _process_died(self, process: ProcessId) -> None:
        self._members.bury(process)
        self._ledger.forget(process)
        self._batches.process_died(process)
        volumes = self._volumes.living_in(process) if self._volumes is not None else []
        kept = self._index.process_died(process, volumes)
        if self._volumes is not None and not volumes:
            self._volumes.free_writer(process, tuple(kept))
        self._waiting.wake()
