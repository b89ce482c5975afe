"""Copies between addresses of this process: what the local and the shared-memory backend have in common.

Small copies run in the calling thread. Large copies are cut into parts that a few copy threads take one by one, so that
no thread waits for a slower one. A thread that waits for the result takes parts too, so a transfer needs no thread
switch to begin.
"""

import asyncio
import functools
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from skipper.dataplane import tensors
from skipper.dataplane._copy import CHANGED, OK, GuardedRows, changed_word, copy, copy_rows, guarded_copy
from skipper.dataplane.backends.base import Done, Remote, Transfer
from skipper.dataplane.errors import (
    BufferDroppedError,
    DataplaneError,
    OwnerDiedError,
    TransferError,
    TransferTimeoutError,
)
from skipper.dataplane.handle import Handle
from skipper.dataplane.identity import ProcessWatch
from skipper.dataplane.layout import Rows, row_bytes, single, single_stripes, stripes
from skipper.dataplane.operation import DONE, Helper, Operation
from skipper.dataplane.regions import HOST, Region

INLINE_BYTES = 1 << 20
"""Up to this size the calling thread copies, also if it runs an event loop: handing over and back costs as much, some
50 us."""

PART_BYTES = 8 << 20
"""Size of a part of a large copy: small enough to distribute evenly, and so large that handing it over costs little
compared with the copy. Other threads do not speed up a copy of one part: the calling thread copies it, unless it
runs an event loop."""

STREAM_BYTES = 16 << 20
"""From this size on a copy bypasses the cache: 1.2 to 1.3 times faster on machines with 2 MiB L2 and 32 MiB L3."""


_GPU_SPEED = 64
"""What a GPU copies within its memory while a CPU copies a byte; measured: 1,240 and some 10 GB/s."""


class CopyPool:
    """The copy threads of a process; daemons, started when first needed. `threads` may be changed for later copies."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._started = 0
        self._lock = threading.Lock()
        self._queue: SimpleQueue[Helper] = SimpleQueue()

    def offer(self, work: Helper, times: int) -> None:
        """Let up to `times` threads call `work`, which must not raise."""
        if self._started < min(self.threads, times):
            self._start(min(self.threads, times))
        for _ in range(times):
            self._queue.put(work)

    def memcpy(self, dst: int, src: int, nbytes: int, threads: int, *, stream: bool = False) -> None:
        """Copy between addresses in `threads` stripes, one of them in the calling thread; return when done."""
        if threads == 1:
            copy(dst, src, nbytes, stream)
            return
        parts = stripes(single(dst, src, nbytes), threads)
        waiting = threading.Semaphore(0)

        def copy_part(rows: Rows) -> None:
            copy_rows(rows, False, stream)
            waiting.release()

        for part in parts[:-1]:
            self.offer(functools.partial(copy_part, part), 1)
        copy_rows(parts[-1], False, stream)
        for _ in parts[:-1]:
            waiting.acquire()

    def _start(self, wanted: int) -> None:
        with self._lock:
            while self._started < wanted:
                self._started += 1
                name = f"dataplane-copy-{self._started}"
                threading.Thread(target=self._serve, name=name, daemon=True).start()

    def _serve(self) -> None:
        while True:
            self._queue.get()()


class CopyTransfer(Transfer):
    """Rows whose two sides are both mapped here, with the epoch words of the remote side."""

    def __init__(
        self,
        parts: list[Rows],
        remotes: Sequence[Remote],
        locals_: Sequence[Region],
        *,
        to_remote: bool,
        pool: CopyPool,
        watch: ProcessWatch | None,
        pin: Callable[[], object] = lambda: None,
        places: Sequence[tensors.Location] | None = None,
    ) -> None:
        """Prepare it.

        Args:
            parts: The rows, cut up.
            remotes: Registrations by key of the rows.
            locals_: All of one kind of memory, and of one device.
            to_remote: The direction.
            pool: Takes part in large copies.
            watch: Watch of the owner; None if that is this process.
            pin: Called for each start; what it returns is kept until the end.
            places: Where the memory of `remotes` is in this process, if not as their handles say.
        """
        self.to_remote = to_remote
        self._pool = pool
        self._watch = watch
        self._pin = pin
        self._remotes = tuple(remotes)  # these hold the mappings
        self._locals = tuple(locals_)
        self._words: NDArray[np.uint64] = np.array([remote.word for remote in remotes], dtype=np.uint64)
        self._epochs: NDArray[np.uint64] = np.array([remote.handle.epoch for remote in remotes], dtype=np.uint64)
        self.parts = parts
        self._nbytes = sum(int(row_bytes(rows).sum()) for rows in parts)
        self.stream = self._nbytes >= STREAM_BYTES
        self.local = (locals_[0].kind, locals_[0].device)
        self.places = places or [(remote.handle.kind, remote.handle.device) for remote in remotes]
        self.on_host = {self.local, *self.places} == {(HOST, 0)}
        self._on_device: list[tensors.DeviceRows | None] = [None] * len(parts)
        # A copy that may be done at once has one part.
        pidfd = -1 if watch is None else watch.pidfd
        self._whole = (
            GuardedRows(parts[0], self._nbytes, self._words, self._epochs, to_remote, pidfd)
            if self.on_host and len(parts) == 1
            else None
        )

    def start(self, deadline: float, done: Done) -> Helper | None:
        """See `Transfer`."""
        try:
            pinned = self._pin()
        except BufferDroppedError as error:
            done(error)
            return None
        fault = self.fault() if self.to_remote else None
        if fault is not None:
            done(fault)
            return None
        run = _CopyRun(self, deadline, done, pinned)
        if at_once(self._nbytes):
            run.help()
            return None
        self._pool.offer(run.help, min(len(self.parts), self._pool.threads))
        return run.help

    def submit(self, timeout: float) -> Operation:
        """See `Transfer`."""
        if self._whole is None or not at_once(self._nbytes):
            return super().submit(timeout)
        try:
            _pinned = self._pin()  # until we return
        except BufferDroppedError as error:
            return Operation.failed(error)
        fault = None if self._whole.copy() else self.fault()
        return DONE if fault is None else Operation.failed(fault)

    def copy_part(self, index: int) -> None:
        """Copy one of the parts, unguarded.

        Raises:
            TransferError: A GPU reports an error.
            ValueError: Memory of a GPU, and a stride that is negative.
        """
        rows = self.parts[index]
        if self.on_host:
            copy_rows(rows, self.to_remote, self.stream)
            return
        prepared = self._on_device[index]
        if prepared is None:
            prepared = tensors.DeviceRows(rows, self.to_remote, self.local, self.places)
            self._on_device[index] = prepared
        prepared.copy()

    def fault(self) -> DataplaneError | None:
        """Why no transfer can succeed any more: a word has changed, or the owner is gone. None if both are fine."""
        at = changed_word(self._words, self._epochs)
        if at >= 0:
            return dropped(self._remotes[at].handle)
        if self._watch is not None and self._watch.gone:
            return OwnerDiedError(f"{self._watch.owner} is gone")
        return None


class _CopyRun:
    """One start of a transfer. Threads claim its parts one by one; the thread that finishes last checks and reports."""

    def __init__(self, transfer: CopyTransfer, deadline: float, done: Done, pinned: object) -> None:
        self._transfer: CopyTransfer | None = transfer
        self._deadline = deadline
        self._done = done
        self._pinned = pinned
        self._claims = itertools.count()
        self._finished = itertools.count(1)
        self._error: BaseException | None = None

    def help(self) -> None:
        """Copy parts until every part is begun."""
        transfer = self._transfer
        if transfer is None:
            return
        parts = transfer.parts
        while (claim := next(self._claims)) < len(parts):
            if time.monotonic() > self._deadline:
                self._error = TransferTimeoutError("the deadline passed before the copy was complete")
            elif self._error is None:
                self._copy(transfer, claim)
            if next(self._finished) == len(parts):
                self._finish(transfer)

    def _copy(self, transfer: CopyTransfer, index: int) -> None:
        try:
            transfer.copy_part(index)
        except Exception as error:  # noqa: BLE001 - the error is the caller's, not this thread's
            self._error = error

    def _finish(self, transfer: CopyTransfer) -> None:
        # Offers that no thread has taken yet may stay in the pool's queue for a while; they must hold no memory.
        self._transfer = self._pinned = None
        self._done(self._error or transfer.fault())


def at_once(nbytes: int) -> bool:
    """Whether the calling thread makes the copy before it returns."""
    return nbytes <= INLINE_BYTES or (nbytes <= PART_BYTES and not _in_event_loop())


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def copy_by_gpu(
    local: Region, remote: Remote, address: int, place: tensors.Location, watch: ProcessWatch | None, *, to_remote: bool
) -> Operation | None:
    """One contiguous copy that a GPU takes part in, between the checks of its epoch word, by the calling thread.

    Args:
        local: The memory of this side.
        remote: The registration that the other side is part of.
        address: Where that side begins in this process.
        place: The kind of its memory, and the device.
        watch: Watch of the owner; None if that is this process.
        to_remote: The direction.

    Returns:
        The operation, which has ended; None if it would block this thread for too long, or is between two GPUs.
    """
    gpus = {device for kind, device in ((local.kind, local.device), place) if kind is not HOST}
    with_host = HOST in (local.kind, place[0])
    if len(gpus) > 1 or not at_once(local.nbytes if with_host else local.nbytes // _GPU_SPEED):
        return None
    fault = _fault(remote, watch)
    if fault is None:
        target, source = (address, local.address) if to_remote else (local.address, address)
        try:
            tensors.copy(((target, source, local.nbytes),), gpus.pop(), with_host=with_host)
        except TransferError as error:
            return Operation.failed(error)
        fault = _fault(remote, watch)
    return DONE if fault is None else Operation.failed(fault)


def _fault(remote: Remote, watch: ProcessWatch | None) -> DataplaneError | None:
    """Why the copied bytes are not those of that buffer; None if they are."""
    pidfd = -1 if watch is None else watch.pidfd
    status = guarded_copy(0, 0, 0, False, remote.word, remote.handle.epoch, pidfd)  # of no bytes: only the checks
    if status == OK:
        return None
    return dropped(remote.handle) if status == CHANGED else OwnerDiedError(f"{remote.handle.card.owner} is gone")


def parts_of(rows: Rows, *, on_host: bool) -> list[Rows]:
    """Rows, cut into the parts of a copy. Copies with a GPU are not distributed to threads: that was slower."""
    if not on_host:
        return [rows]
    return stripes(rows, max(1, -(-int(row_bytes(rows).sum()) // PART_BYTES)))


def parts_between(local: int, remote: int, nbytes: int, *, on_host: bool) -> list[Rows]:
    """The parts of one contiguous copy, as `parts_of` cuts it."""
    return single_stripes(local, remote, nbytes, step=PART_BYTES if on_host else nbytes)


def dropped(handle: Handle) -> BufferDroppedError:
    """The error for a word that has changed."""
    return BufferDroppedError(f"{handle} was dropped by its owner; ask the owner for a new handle")
