"""An owner of memory that UCX reaches."""

import functools
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from skipper.dataplane import memfd
from skipper.dataplane.backends.base import Done, Peer, Remote, Transfer
from skipper.dataplane.backends.ucx.card import UcxCard, require_key, unpack_parts
from skipper.dataplane.backends.ucx.connections import OwnerConnections, RemoteKeys, UcxConnection
from skipper.dataplane.backends.ucx.engine import ClientWorker, UcxEngine
from skipper.dataplane.backends.ucx.run import SPIN_S, Batches, UcxAtomicRun, UcxRun
from skipper.dataplane.copying import INLINE_BYTES
from skipper.dataplane.epochs import PAGE_BYTES, WORD
from skipper.dataplane.errors import BackendUnavailableError, DescriptorError, TransferError
from skipper.dataplane.handle import UCX, Card, Handle
from skipper.dataplane.layout import Rows, row_bytes, with_keys
from skipper.dataplane.operation import DONE, Atomic, AtomicKind, FetchOperation, Helper, Operation
from skipper.dataplane.regions import HOST, Region

if TYPE_CHECKING:
    from skipper.dataplane.backends.ucx import _ucp

_SPARE = 4  # batches that a short transfer keeps: so many threads at a time find one when they submit it


class UcxTransfer(Transfer):
    """Rows for one peer, in UCX's order."""

    def __init__(
        self,
        owner: OwnerConnections,
        rows: Rows,
        remotes: tuple[Remote, ...],
        locals_: tuple[Region, ...],
        to_remote: bool,
    ) -> None:
        self._owner = owner
        self._remotes = remotes
        self._locals = locals_
        self._to_remote = to_remote
        self._nbytes = int(row_bytes(rows).sum())
        # Many registrations share a storage and its key, and all share the few epoch pages: unpack each key once.
        keys: dict[bytes, int] = {}
        of_remote = [keys.setdefault(remote.key.packed[0], len(keys)) for remote in remotes]
        word_keys = [keys.setdefault(remote.key.packed[1], len(keys)) for remote in remotes]
        self._word_keys = np.array(word_keys, dtype=np.int64)
        self._keys = RemoteKeys(tuple(keys))
        # A batch checks all of its words in the same way.
        self._words_here = all(remote.key.page is not None for remote in remotes)
        words = [remote.word if self._words_here else remote.key.far_word for remote in remotes]
        self._rows_by_word = rows  # messages identify a row by its word
        self._rows = with_keys(rows, of_remote)
        self._words = np.array(words, dtype=np.uint64)
        self._far_words = np.array([remote.key.far_word for remote in remotes], dtype=np.uint64)
        places = [locals_[0].kind, *(remote.handle.kind for remote in remotes)]
        self._on_host = all(kind is HOST for kind in places)
        self._epochs = np.array([remote.handle.epoch for remote in remotes], dtype=np.uint64)
        self._spare: deque[_ucp.Batch] = deque(maxlen=_SPARE)

    def start(self, deadline: float, done: Done) -> Helper | None:
        """See `Transfer`."""
        try:
            batches = self._make(deadline)
        except TransferError as error:
            done(error)
            return None
        short = self._nbytes <= INLINE_BYTES
        if short:
            batches[0][1].advance(SPIN_S, deadline)
        return self._run(deadline, done).begin(batches, begun=short)

    def submit(self, timeout: float) -> Operation:
        """See `Transfer`."""
        if self._nbytes > INLINE_BYTES:
            return super().submit(timeout)
        deadline = time.monotonic() + timeout
        try:
            connection, client, batch = self._again(deadline)
        except TransferError as error:
            return Operation.failed(error)
        if batch.advance(SPIN_S, deadline) == self._owner.engine.ucp.FINISHED:
            if not connection.emulated:
                self._spare.append(batch)
            return DONE
        operation = Operation(1)
        self._run(deadline, operation.part_done).begin(((client, batch),), begun=True)
        return operation

    def _run(self, deadline: float, done: Done) -> UcxRun:
        make = functools.partial(self._make, deadline)
        return UcxRun(self._owner, make, self._remotes, self._locals, deadline, done)

    def _again(self, deadline: float) -> "tuple[UcxConnection, ClientWorker, _ucp.Batch]":
        """The batch of a short transfer: a used one if the connection is still the same."""
        connection, (endpoint, _, client) = self._owner.connected(0, self._keys, deadline)
        try:
            batch = self._spare.pop()  # so that no other thread gets the same
        except IndexError:
            return connection, *self._make(deadline)[0]
        if batch.endpoint is not endpoint:
            return connection, *self._make(deadline)[0]
        batch.rewind()
        return connection, client, batch

    def _make(self, deadline: float) -> Batches:
        numbers = self._owner.spread(self._nbytes)
        by_message = self._on_host and self._owner.connected(numbers[0], self._keys, deadline)[0].emulated
        rows = self._rows_by_word if by_message else self._rows
        share = self._owner.engine.ucp.UcpShare.many(rows, self._nbytes)
        return [self._batch(number, share, by_message, deadline) for number in numbers]

    def _batch(
        self, number: int, share: "_ucp.UcpShare", by_message: bool, deadline: float
    ) -> "tuple[ClientWorker, _ucp.Batch]":
        _, (endpoint, keys, client) = self._owner.connected(number, self._keys, deadline)
        batch: _ucp.Batch = self._owner.engine.ucp.Batch(
            endpoint, keys, share, self._to_remote, self._locals[0].kind, self._words_here, by_message
        )
        words = self._far_words if by_message else self._words
        batch.guard_many(words, self._word_keys, self._epochs)
        return client, batch


class UcxPeer(Peer):
    """One owner, with the connections to it."""

    backend = "ucx"

    def __init__(self, engine: UcxEngine, card: Card) -> None:
        self.connections = OwnerConnections(engine, card)
        self._ucp = engine.ucp
        self._abandoned = self.connections.abandoned
        self._lock = threading.Lock()
        self._pages: dict[int, memfd.Mapping | None] = {}

    def usable(self) -> bool:
        """Whether the owner is not known to be dead; the next use renews a broken connection."""
        return self.connections.usable()

    def close(self) -> None:
        """See `Peer`."""
        with self._lock:
            self._pages.clear()
        self.connections.close()

    def resolve(self, handle: Handle) -> Remote:
        """See `Peer`. Nothing is sent: UCX has no request for that."""
        if not self.connections.engine.memory_types >> handle.kind & 1:
            # A transfer would begin but never end.
            raise BackendUnavailableError(
                f"UCX cannot move {handle.kind.name.lower()} memory here: this process sees no GPU, or UCX's modules "
                "for it did not load"
            )
        card = UcxCard.of(handle.card)
        if (handle.slot + 1) * WORD > PAGE_BYTES:
            raise DescriptorError(f"the handle of {handle} reaches beyond the owner's memory")
        page = self._page_here(card.page_fd, handle.card.page_token)
        far_word = card.page_address + handle.slot * WORD
        word = far_word if page is None else page.address + handle.slot * WORD
        (key,) = unpack_parts(handle.sections[UCX], 1)
        require_key(key)
        return Remote(handle, handle.base, word, RemoteKeys((key, card.page_key), page, far_word))

    def copy(self, local: Region, remote: Remote, offset: int, *, to_remote: bool, timeout: float) -> Operation:
        """See `Peer`."""
        address = remote.address + offset
        deadline = time.monotonic() + timeout
        small = local.nbytes <= INLINE_BYTES
        try:
            if small and local.kind is HOST:
                way, client = self._way(remote, deadline)
                batch = way.copy(to_remote, local.address, address, local.nbytes, SPIN_S, deadline)
                if batch is None:
                    return DONE
                batches: Batches = ((client, batch),)
            else:
                batches = self._copies(local, remote, address, to_remote, deadline)
                if small:
                    batches[0][1].advance(SPIN_S, deadline)
        except TransferError as error:
            return Operation.failed(error)
        operation = Operation(1)
        again = functools.partial(self._copies, local, remote, address, to_remote, deadline)
        run = UcxRun(self.connections, again, (remote,), (local,), deadline, operation.part_done)
        helper = run.begin(batches, begun=small)
        if helper is not None:
            operation.add_helper(helper)
        return operation

    def compile(self, rows: Rows, remotes: Sequence[Remote], locals_: Sequence[Region], *, to_remote: bool) -> Transfer:
        """See `Peer`."""
        return UcxTransfer(self.connections, rows, tuple(remotes), tuple(locals_), to_remote)

    def atomic(self, remote: Remote, offset: int, atomic: Atomic, *, timeout: float) -> FetchOperation:
        """See `Peer`. The owner's UCX thread does it with a CPU instruction."""
        keys: RemoteKeys = remote.key
        if remote.handle.kind is not HOST:
            message = f"UCX does atomic operations on host memory only, and that of {remote.handle} is not"
            return FetchOperation.failed(BackendUnavailableError(message))

        deadline = time.monotonic() + timeout

        def make() -> Batches:
            _, (endpoint, _, client) = self.connections.connected(0, keys, deadline)
            batch: _ucp.Batch = self._ucp.Batch.atomic(
                endpoint,
                atomic.kind is AtomicKind.COMPARE_AND_SWAP,
                remote.address + offset,
                atomic.operand,
                atomic.compare,
                keys.far_word,
                remote.handle.epoch,
            )
            return [(client, batch)]

        try:
            batches = make()
        except TransferError as error:
            return FetchOperation.failed(error)
        operation = FetchOperation()
        run = UcxAtomicRun(self.connections, make, (remote,), (), deadline, operation.part_done)
        run.operation = operation
        batches[0][1].advance(SPIN_S, deadline)
        run.begin(batches, begun=True)
        return operation

    def _way(self, remote: Remote, deadline: float) -> "tuple[_ucp.Way, ClientWorker]":
        """The present path for short copies to and from host memory, and the client worker that it belongs to."""
        keys: RemoteKeys = remote.key
        known = keys.way
        told = self._abandoned.count
        if known is None or keys.way_told != told or not known[0].usable:
            connection, (endpoint, unpacked, client) = self.connections.connected(0, keys, deadline)
            by_message = remote.handle.kind is HOST and connection.emulated
            word = keys.far_word if by_message else remote.word
            here, expected = keys.page is not None, remote.handle.epoch
            way = self._ucp.Way(endpoint, unpacked, word, expected, here, by_message)
            known = keys.way = way, client
            keys.way_told = told
        return known

    def _copies(self, local: Region, remote: Remote, address: int, to_remote: bool, deadline: float) -> Batches:
        """The batches of one contiguous copy, for the client workers that share it."""
        ucp, nbytes = self._ucp, local.nbytes
        keys: RemoteKeys = remote.key
        here, expected = keys.page is not None, remote.handle.epoch
        on_host = local.kind is HOST and remote.handle.kind is HOST
        numbers = self.connections.spread(nbytes)
        if len(numbers) == 1:
            connection, (endpoint, unpacked, client) = self.connections.connected(numbers[0], keys, deadline)
            by_message = on_host and connection.emulated
            batch = ucp.Batch.single(
                endpoint,
                unpacked,
                to_remote,
                local.kind,
                local.address,
                address,
                nbytes,
                keys.far_word if by_message else remote.word,
                expected,
                here,
                by_message,
            )
            return ((client, batch),)
        share = ucp.UcpShare.single(local.address, address, nbytes)
        batches = []
        for number in numbers:
            connection, (endpoint, unpacked, client) = self.connections.connected(number, keys, deadline)
            by_message = on_host and connection.emulated
            batch = ucp.Batch(endpoint, unpacked, share, to_remote, local.kind, here, by_message)
            batch.guard(keys.far_word if by_message else remote.word, expected)
            batches.append((client, batch))
        return batches

    def _page_here(self, fd: int, token: int) -> memfd.Mapping | None:
        """The owner's epoch page, mapped here, so that a word costs a load and no round trip. None on another host."""
        if self.connections.watch is None:
            return None
        with self._lock:
            if token not in self._pages:
                try:
                    self._pages[token] = memfd.attach(self.connections.owner, fd, token)
                except BackendUnavailableError:
                    self._pages[token] = None  # the process of another user: its words are fetched like its data
            return self._pages[token]
