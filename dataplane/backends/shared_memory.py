"""Memory in memfds of its owner: a peer of the same host maps it once and copies at the speed of memory.

The mapping outlives its owner, and copies from it would still return bytes. So every operation also checks the owner's
pidfd: a dead owner is the same error here as on any other backend.
"""

import struct
import threading
from collections import OrderedDict
from collections.abc import Sequence

from skipper.dataplane import memfd
from skipper.dataplane._copy import CHANGED, OK, guarded_atomic, guarded_copy
from skipper.dataplane.arena import HUGE_BLOCK
from skipper.dataplane.backends.base import Backend, BackendStatus, Peer, Remote, Transfer
from skipper.dataplane.copying import (
    PART_BYTES,
    CopyPool,
    CopyTransfer,
    at_once,
    copy_by_gpu,
    dropped,
    parts_between,
    parts_of,
)
from skipper.dataplane.epochs import WORD
from skipper.dataplane.errors import BackendUnavailableError, DescriptorError, OwnerDiedError
from skipper.dataplane.handle import SHM, Card, Handle, Sections, unpack_section
from skipper.dataplane.identity import OwnerId, ProcessWatch
from skipper.dataplane.layout import Rows
from skipper.dataplane.operation import DONE, Atomic, AtomicKind, FetchOperation, Operation
from skipper.dataplane.regions import HOST, Region
from skipper.dataplane.registration import Registration

_PAGE = struct.Struct("<I")  # descriptor of the epoch page; its token is in the card already
_DATA = struct.Struct("<IQQ")  # descriptor and token of the memfd, offset of the registration in it

_MAPPINGS = 4096  # mappings kept per owner, besides those that resolved handles hold


class SharedMemoryBackend(Backend):
    """Usable between processes of one host, user and pid namespace."""

    name = "shm"
    number = SHM

    def __init__(self, owner: OwnerId, pool: CopyPool) -> None:
        self._owner = owner
        self._pool = pool

    def status(self) -> BackendStatus:
        """Always usable, but not for every handle."""
        return BackendStatus(self.name, True, "memory made by dataplane.empty, within this host", ("host",))

    def obstacle(self, handle: Handle) -> str | None:
        """See `Backend`."""
        if SHM not in handle.sections or SHM not in handle.card.sections:
            return "its memory was not made by dataplane.empty, or not exported for shared memory"
        if handle.card.owner.host != self._owner.host:
            return "its owner is on another host or in another pid namespace"
        return None

    def connect(self, card: Card) -> Peer:
        """See `Backend`."""
        return SharedMemoryPeer(card.owner, self._pool)

    def export(self, registration: Registration) -> Sections | None:
        """See `Backend`."""
        if registration.shared is None:
            raise BackendUnavailableError("the memory was not made by dataplane.empty")
        mapping, offset = registration.shared
        page = registration.epoch.page
        return _PAGE.pack(page.fd), _DATA.pack(mapping.fd, mapping.token, offset)


class SharedMemoryPeer(Peer):
    """Another process of this host, and its memory that is mapped here."""

    backend = "shm"

    def __init__(self, owner: OwnerId, pool: CopyPool) -> None:
        self._owner = owner
        self._pool = pool
        self._watch = ProcessWatch(owner)
        self._pidfd = self._watch.pidfd
        self._lock = threading.Lock()
        self._mappings: OrderedDict[int, memfd.Mapping] = OrderedDict()  # by token

    def usable(self) -> bool:
        """Whether the process lives."""
        return not self._watch.gone

    def close(self) -> None:
        """Forget the mappings. They and the pidfd are closed with the last handle and transfer that use them."""
        with self._lock:
            self._mappings.clear()

    def resolve(self, handle: Handle) -> Remote:
        """Map the handle's memory, and check its bounds against the real memfd."""
        (page_fd,) = unpack_section(_PAGE, handle.card.sections[SHM], "shared memory")
        fd, token, offset = unpack_section(_DATA, handle.sections[SHM], "shared memory")
        page = self._map(page_fd, handle.card.page_token)
        data = self._map(fd, token)
        if offset + handle.total > data.nbytes or (handle.slot + 1) * WORD > page.nbytes or handle.kind is not HOST:
            raise DescriptorError(f"the handle of {handle} reaches beyond the owner's memory")
        if handle.total >= HUGE_BLOCK:
            data.memory.advise_huge(offset, handle.total)  # for pages that a write from here touches first
        return Remote(handle, data.address + offset, page.address + handle.slot * WORD, (data, page))

    def stream(self, local: Region, remote: Remote, offset: int, *, timeout: float) -> Operation:
        """See `Peer`."""
        return self.copy(local, remote, offset, to_remote=False, timeout=timeout, stream=True)

    def copy(
        self, local: Region, remote: Remote, offset: int, *, to_remote: bool, timeout: float, stream: bool = False
    ) -> Operation:
        """See `Peer`; `stream` bypasses the cache."""
        address = remote.address + offset
        if local.kind is not HOST:
            operation = copy_by_gpu(local, remote, address, (HOST, 0), self._watch, to_remote=to_remote)
            if operation is not None:
                return operation
        is_small = local.nbytes <= PART_BYTES if stream else at_once(local.nbytes)
        if not is_small or local.kind is not HOST:
            parts = parts_between(local.address, address, local.nbytes, on_host=local.kind is HOST)
            return self._transfer(parts, (remote,), (local,), to_remote).submit(timeout)
        status = guarded_copy(
            local.address,
            address,
            local.nbytes,
            to_remote,
            remote.word,
            remote.handle.epoch,
            self._pidfd,
            stream,
        )
        if status == OK:
            return DONE
        if status == CHANGED:
            return Operation.failed(dropped(remote.handle))
        return Operation.failed(OwnerDiedError(f"{self._owner} is gone"))

    def compile(self, rows: Rows, remotes: Sequence[Remote], locals_: Sequence[Region], *, to_remote: bool) -> Transfer:
        """See `Peer`."""
        parts = parts_of(rows, on_host=locals_[0].kind is HOST)
        return self._transfer(parts, remotes, locals_, to_remote)

    def atomic(self, remote: Remote, offset: int, atomic: Atomic, *, timeout: float) -> FetchOperation:
        """See `Peer`. Also atomic with CPU operations on that word in any process that maps it."""
        swap = atomic.kind is AtomicKind.COMPARE_AND_SWAP
        status, previous = guarded_atomic(
            swap, remote.address + offset, atomic.operand, atomic.compare, remote.word, remote.handle.epoch, self._pidfd
        )
        if status == OK:
            return FetchOperation.succeeded(previous)
        if status == CHANGED:
            return FetchOperation.failed(dropped(remote.handle))
        return FetchOperation.failed(OwnerDiedError(f"{self._owner} is gone, and its memory with it"))

    def _transfer(
        self, parts: list[Rows], remotes: Sequence[Remote], locals_: Sequence[Region], to_remote: bool
    ) -> CopyTransfer:
        return CopyTransfer(parts, remotes, locals_, to_remote=to_remote, pool=self._pool, watch=self._watch)

    def _map(self, fd: int, token: int) -> memfd.Mapping:
        with self._lock:
            mapping = self._mappings.get(token)
            if mapping is None:
                mapping = memfd.attach(self._owner, fd, token)
                self._mappings[token] = mapping
                while len(self._mappings) > _MAPPINGS:
                    self._mappings.popitem(last=False)
            else:
                self._mappings.move_to_end(token)
            return mapping
