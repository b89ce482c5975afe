"""Compiled batches to one owner, over UCX."""

import functools
import time
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from skipper.dataplane.backends.base import Done, Remote, Transfer
from skipper.dataplane.backends.ucx.client import ClientWorker
from skipper.dataplane.backends.ucx.connections import OwnerConnections, RemoteKeys, UcxConnection
from skipper.dataplane.backends.ucx.run import SPIN_S, Batches, UcxRun
from skipper.dataplane.copying import INLINE_BYTES
from skipper.dataplane.errors import TransferError
from skipper.dataplane.layout import Rows, row_bytes, with_keys
from skipper.dataplane.operation import DONE, Helper, Operation
from skipper.dataplane.regions import HOST, Region

if TYPE_CHECKING:
    from skipper.dataplane.backends.ucx import _ucp

_SPARE = 4  # batches that a short transfer keeps: as many threads may submit it at a time and find one


class UcxTransfer(Transfer):
    """Rows for one peer, in the order in which UCX gets them."""

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
        # Many registrations share a storage and its key, all share the few epoch pages: unpack each once.
        keys: dict[bytes, int] = {}
        of_remote = [keys.setdefault(remote.key.packed[0], len(keys)) for remote in remotes]
        word_keys = [keys.setdefault(remote.key.packed[1], len(keys)) for remote in remotes]
        self._word_keys = np.array(word_keys, dtype=np.int64)
        self._keys = RemoteKeys(tuple(keys))
        # A batch looks at all of its words in the same way.
        self._words_here = all(remote.key.page is not None for remote in remotes)
        words = [remote.word if self._words_here else remote.key.far_word for remote in remotes]
        self._rows_by_word = rows  # in messages a row is told by its word
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
        """The batch of a short transfer: one that has been used before, where the connection is still the same."""
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
