"""Memory of a GPU, mapped by a peer of the same host (CUDA IPC): the GPU copies, at its own speed.

CUDA maps whole allocations, and memory that a peer has mapped is not free until the peer unmaps it. So a mapping lasts
only while something here uses it. As with shared memory of the host, the owner's epoch words and its pidfd are checked
before and after every copy.
"""

import struct
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence

from skipper.dataplane import cuda_driver, memfd, tensors
from skipper.dataplane.backends.base import Backend, BackendStatus, Peer, Remote, Transfer
from skipper.dataplane.copying import CopyPool, CopyTransfer, copy_by_gpu, parts_of
from skipper.dataplane.epochs import WORD
from skipper.dataplane.errors import BackendUnavailableError, DescriptorError
from skipper.dataplane.handle import CUDA_IPC, Card, Handle, Sections, unpack_section
from skipper.dataplane.identity import OwnerId, ProcessWatch
from skipper.dataplane.layout import Rows, single
from skipper.dataplane.operation import Atomic, FetchOperation, Operation
from skipper.dataplane.regions import MemoryKind, Region
from skipper.dataplane.registration import Registration

_PAGE = struct.Struct("<I")  # descriptor of the epoch page; its token is in the card already
_DATA = struct.Struct(f"<{cuda_driver.IPC_NBYTES}s{cuda_driver.GPU_NBYTES}sQQ")
"""The driver's handle, the GPU's UUID, the number of the allocation, and the offset of the registration in it."""

_REFUSALS = 1024  # remembered

_Refusals = OrderedDict[tuple[OwnerId, bytes], str]


class CudaIpcBackend(Backend):
    """Usable between processes of one host, user and pid namespace, if CUDA lets them share memory."""

    name = "cuda_ipc"
    number = CUDA_IPC
    reaches_all = False

    def __init__(self, owner: OwnerId, pool: CopyPool) -> None:
        self._owner = owner
        self._pool = pool
        self._refusals: _Refusals = OrderedDict()

    def status(self) -> BackendStatus:
        """Whether CUDA and its driver exist; which memory can be shared is known at its registration."""
        why = _missing()
        if why is not None:
            return BackendStatus(self.name, False, why)
        return BackendStatus(self.name, True, "memory of a GPU, within this host", ("cuda",))

    def obstacle(self, handle: Handle) -> str | None:
        """See `Backend`."""
        if CUDA_IPC not in handle.sections or CUDA_IPC not in handle.card.sections:
            return "its memory is not that of a GPU, or CUDA cannot share it"
        if handle.card.owner.host != self._owner.host:
            return "its owner is on another host or in another pid namespace"
        return _missing() or self._refusals.get((handle.card.owner, _gpu_of(handle)))

    def connect(self, card: Card) -> Peer:
        """See `Backend`."""
        return CudaIpcPeer(card.owner, self._pool, self._refusals)

    def export(self, registration: Registration) -> Sections | None:
        """See `Backend`."""
        region = registration.region
        if region is None:
            return None
        if region.kind is not MemoryKind.CUDA:
            raise BackendUnavailableError("the memory is not that of a GPU")
        shared = cuda_driver.share(region.address, region.device)
        page = registration.epoch.page
        return _PAGE.pack(page.fd), _DATA.pack(shared.ipc, shared.gpu, shared.number, region.address - shared.address)


class MappedAllocation:
    """An allocation of another process, mapped here until the last reference goes.

    Attributes:
        number: Of the allocation in its owner.
        device: The GPU of this process for which it is mapped.
        address: Where it is mapped.
        nbytes: Its length.
    """

    __slots__ = ("__weakref__", "address", "device", "nbytes", "number")

    def __init__(self, ipc: bytes, gpu: bytes, number: int) -> None:
        """Map it.

        Raises:
            BackendUnavailableError: CUDA cannot map it, or torch cannot use the mapping.
        """
        tensors.start_cuda()
        device = cuda_driver.gpus().get(gpu)
        # If this process does not see that GPU, it reaches it from the one that it uses.
        self.device = tensors.current_gpu() if device is None else device
        self.number = number
        self.address, self.nbytes = cuda_driver.open_shared(ipc, self.device)
        end = weakref.finalize(self, cuda_driver.close_shared, self.address, self.device)
        end.atexit = False
        tensors.require_usable(self.address, self.device)


class CudaIpcPeer(Peer):
    """Another process of this host, and its GPU memory that is mapped here."""

    backend = "cuda_ipc"

    def __init__(self, owner: OwnerId, pool: CopyPool, refusals: _Refusals) -> None:
        self._owner = owner
        self._pool = pool
        self._refusals = refusals
        self._watch = ProcessWatch(owner)
        self._lock = threading.Lock()
        self._pages: dict[int, memfd.Mapping] = {}  # by token
        self._allocations: weakref.WeakValueDictionary[bytes, MappedAllocation] = weakref.WeakValueDictionary()

    def usable(self) -> bool:
        """Whether the process lives."""
        return not self._watch.gone

    def close(self) -> None:
        """Forget the mappings. Each is unmapped with the last handle and transfer that use it."""
        with self._lock:
            self._pages.clear()

    def resolve(self, handle: Handle) -> Remote:
        """Map the handle's memory, and check its bounds against the real allocation."""
        (page_fd,) = unpack_section(_PAGE, handle.card.sections[CUDA_IPC], "CUDA IPC")
        ipc, gpu, number, offset = unpack_section(_DATA, handle.sections[CUDA_IPC], "CUDA IPC")
        with self._lock:
            page = self._page(page_fd, handle.card.page_token)
            memory = self._allocation(ipc, gpu, number)
        outside = offset + handle.total > memory.nbytes or (handle.slot + 1) * WORD > page.nbytes
        if outside or handle.kind is not MemoryKind.CUDA:
            raise DescriptorError(f"the handle of {handle} reaches beyond the owner's memory")
        return Remote(handle, memory.address + offset, page.address + handle.slot * WORD, (memory, page))

    def copy(self, local: Region, remote: Remote, offset: int, *, to_remote: bool, timeout: float) -> Operation:
        """See `Peer`."""
        address = remote.address + offset
        place = (MemoryKind.CUDA, remote.key[0].device)
        operation = copy_by_gpu(local, remote, address, place, self._watch, to_remote=to_remote)
        if operation is not None:
            return operation
        rows = single(local.address, address, local.nbytes)
        return self.compile(rows, (remote,), (local,), to_remote=to_remote).submit(timeout)

    def compile(self, rows: Rows, remotes: Sequence[Remote], locals_: Sequence[Region], *, to_remote: bool) -> Transfer:
        """See `Peer`."""
        parts = parts_of(rows, on_host=False)
        places = [(MemoryKind.CUDA, remote.key[0].device) for remote in remotes]
        return CopyTransfer(
            parts, remotes, locals_, to_remote=to_remote, pool=self._pool, watch=self._watch, places=places
        )

    def atomic(self, remote: Remote, offset: int, atomic: Atomic, *, timeout: float) -> FetchOperation:
        """Refused."""
        message = f"atomic operations reach host memory only, and that of {remote.handle} is not"
        return FetchOperation.failed(BackendUnavailableError(message))

    def _page(self, fd: int, token: int) -> memfd.Mapping:
        page = self._pages.get(token)
        if page is None:
            page = self._pages[token] = memfd.attach(self._owner, fd, token)
        return page

    def _allocation(self, ipc: bytes, gpu: bytes, number: int) -> MappedAllocation:
        known = self._allocations.get(ipc)
        if known is None:
            try:
                known = self._allocations[ipc] = MappedAllocation(ipc, gpu, number)
            except BackendUnavailableError as error:
                self._refusals[self._owner, gpu] = str(error)
                if len(self._refusals) > _REFUSALS:
                    self._refusals.popitem(last=False)
                raise
        elif known.number != number:
            # The driver would return the old mapping again.
            raise BackendUnavailableError("this process still uses memory that the owner had at that address before")
        return known


def _gpu_of(handle: Handle) -> bytes:
    gpu: bytes = unpack_section(_DATA, handle.sections[CUDA_IPC], "CUDA IPC")[1]
    return gpu


def _missing() -> str | None:
    """Why this process cannot use CUDA; None if it can, as far as that is known without starting CUDA."""
    if tensors.built_for_cuda() is None:
        return "torch was built without CUDA"
    if tensors.forked_from_cuda():
        return "this process was forked from one that used CUDA, which does not survive a fork; start it by spawn"
    return cuda_driver.missing()
