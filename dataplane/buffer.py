"""`RDMABuffer`: memory of one process that others read and write without its Python code."""

from typing import Any

from skipper.dataplane import handle as handles
from skipper.dataplane import process, tensors
from skipper.dataplane.backends.base import Peer, Remote
from skipper.dataplane.errors import DataplaneError
from skipper.dataplane.handle import Handle
from skipper.dataplane.identity import OwnerId
from skipper.dataplane.memory import contiguous, require_range, require_writable
from skipper.dataplane.operation import (
    DONE,
    LONGEST_S,
    Atomic,
    FetchOperation,
    Operation,
    require_timeout,
    require_word,
)
from skipper.dataplane.regions import HOST, Region
from skipper.dataplane.registration import Registration
from skipper.dataplane.stream_order import begin_in_order, require_done


class RDMABuffer:
    """A registered range of memory, or a handle to one of another process.

    The process that constructs it owns the memory. Any process can read and write it through the buffer, its pickles
    and its parts (`at`). Contents are raw bytes: callers have to know the dtypes. Two operations that touch the same
    bytes at the same time have no order between them.

    The owner's object keeps `data` alive; handles in other processes do not. They are valid until `drop()`, or until
    the memory is freed because nothing in the owner references it any more (a tensor's storage, an array); then their
    operations end with `BufferDroppedError`. The freeing of a plain bytearray or memoryview cannot be observed, so such
    a buffer keeps its memory until `drop()`, once its handle has been serialized.

    Transfers of GPU memory are ordered with the *current streams* of the calling thread, for the GPUs of this process
    whose memory they touch: a transfer begins when the work that is already queued there is done; kernels that are
    queued after its `get()` or `await` see the bytes. A handle is serialized or pickled when the work is done that was
    queued on the current stream, both at that time and when the buffer was made. How later kernels of the owner are
    ordered with transfers of its peers is up to them, as for host memory.

    Example:
        ```python
        import numpy as np

        from skipper.dataplane import RDMABuffer, empty_array

        weights = empty_array((4,), "float32")  # memory that other processes of this host can map
        weights[:] = 1.0
        buffer = RDMABuffer(weights)  # pickle it to any process, which reads or writes without this one's Python
        mine = np.empty(4, dtype="float32")
        buffer.read_into(mine).get()
        print(mine)  # [1. 1. 1. 1.]
        buffer.write_from(mine * 2).get()
        print(weights)  # [2. 2. 2. 2.]
        buffer.drop()
        ```
    """

    __slots__ = ("_exported", "_handle", "_nbytes", "_offset", "_owner", "_produced", "_registration", "_route")

    def __init__(self, data: Any, *, writable: bool = True) -> None:
        """Register memory of this process.

        Args:
            data: A contiguous torch tensor (CPU or CUDA), a contiguous numpy array, or another object with the buffer
                protocol such as a bytearray. Memory from `dataplane.empty` is the fastest within a host.
            writable: Whether peers may write.

        Raises:
            RegistrationError: The system has no memory or file descriptor left.
            TypeError: `data` is not memory that can be registered.
            TransferError: The GPU reports an error, perhaps of a kernel that ran before.
            ValueError: It has no bytes, is not contiguous, its storage was freed, or it is read-only and `writable` is
                true.
        """
        region = contiguous(data, "data")
        if writable:
            require_writable(region, "data (pass writable=False to let peers only read it)")
        here = process.current()
        self._owner = here.owner
        self._registration: Registration | None = here.registrations.add(data, region, writable=writable)
        self._handle: Handle | None = None
        self._offset = 0
        self._nbytes = region.nbytes
        self._produced = [] if region.kind is HOST else tensors.marks([region.device])
        self._exported: tuple[object, Handle] | None = None
        self._route: tuple[object, Peer, Remote] | None = None

    @classmethod
    def _view(
        cls, owner: OwnerId, registration: Registration | None, handle: Handle | None, offset: int, nbytes: int
    ) -> "RDMABuffer":
        buffer = cls.__new__(cls)
        buffer._owner = owner
        buffer._registration = registration
        buffer._handle = handle
        buffer._offset = offset
        buffer._nbytes = nbytes
        buffer._produced = []
        buffer._exported = None
        buffer._route = None
        return buffer

    @property
    def nbytes(self) -> int:
        """Its length in bytes."""
        return self._nbytes

    def size(self) -> int:
        """Its length in bytes."""
        return self._nbytes

    @property
    def owner(self) -> OwnerId:
        """The process that owns the memory."""
        return self._owner

    @property
    def writable(self) -> bool:
        """Whether `write_from` is allowed."""
        return self._source().writable

    @property
    def backend(self) -> str:
        """The backend that an operation from here would use: "local", "shm", "cuda_ipc", "ucx" or "verbs".

        Connects nothing.

        Raises:
            BackendUnavailableError: No backend reaches the memory from here.
        """
        if self._registration is not None and self._owner == process.current().owner:
            return "local"
        return process.current().selector.backend_for(self._exported_handle()).name

    def at(self, offset: int, nbytes: int) -> "RDMABuffer":
        """The part [offset, offset + nbytes) as a buffer of its own, which shares the registration and `drop()`.

        Raises:
            TypeError: One of them is not an integer.
            ValueError: The part is empty, or not within the buffer.
        """
        require_range(offset, nbytes, self._nbytes)
        part = self._view(self._owner, self._registration, self._handle, self._offset + int(offset), int(nbytes))
        part._produced = self._produced
        part._route = self._route
        return part

    def read_into(self, dst: Any, *, timeout: float = 60.0, stream: bool = False) -> Operation:
        """Copy the whole buffer into `dst`.

        This process does all the work (over TCP the owner's UCX thread takes part, but not its Python code). A small
        transfer has usually ended when this returns.

        Args:
            dst: Contiguous writable memory with as many bytes.
            timeout: Seconds until the operation ends with `TransferTimeoutError`.
            stream: Whether a copy from mapped memory should bypass the cache, as large ones do anyway: for a small part
                of a large read that would not stay in the cache.

        Returns:
            The operation. It keeps `dst` alive; the content of `dst` is undefined until the operation has succeeded.

        Raises:
            BackendUnavailableError: No backend reaches the memory from here.
            TypeError: `dst` is not memory that can be written.
            ValueError: Sizes differ, `dst` is read-only, not contiguous, has no bytes, or overlaps the buffer.
        """
        region = contiguous(dst, "dst")
        require_writable(region, "dst")
        if region.nbytes != self._nbytes:
            raise ValueError(f"dst has {region.nbytes} bytes, the buffer {self._nbytes}")
        return self._copy(region, False, timeout, stream=stream)

    def write_from(self, src: Any, *, timeout: float = 60.0) -> Operation:
        """Copy `src` over the whole buffer.

        Args:
            src: Contiguous memory with as many bytes.
            timeout: Seconds until the operation ends with `TransferTimeoutError`.

        Returns:
            The operation; do not change `src` until it has ended. After an error any part may have been written.

        Raises:
            BackendUnavailableError: No backend reaches the memory from here.
            TypeError: `src` is not memory.
            ValueError: Sizes differ, `src` is not contiguous, has no bytes, or overlaps the buffer; or the owner
                registered the buffer as read-only.
        """
        region = contiguous(src, "src")
        if region.nbytes != self._nbytes:
            raise ValueError(f"src has {region.nbytes} bytes, the buffer {self._nbytes}")
        self.require_writable()
        return self._copy(region, True, timeout)

    def fetch_add(self, value: int, *, offset: int = 0, timeout: float = 60.0) -> FetchOperation:
        """Add to the unsigned 8-byte word at `offset`, modulo 2**64, and return its previous value.

        Atomic with respect to every other atomic operation on that word through the same backend; which backends are
        also atomic with one another and with the CPU is in docs/reference/buffers.md. It runs at most once: if an error
        leaves open whether it took place, it is not retried.

        Args:
            value: In [-2**63, 2**64); a negative one is taken modulo 2**64.
            offset: Bytes from the start of the buffer to the word, whose address in the owner must be a multiple of 8.
            timeout: Seconds until the operation ends with `TransferTimeoutError`.

        Returns:
            The operation; its result is the word before the addition, in [0, 2**64).

        Raises:
            TypeError: An argument is no integer, or the timeout no number.
            ValueError: The word is out of range or not aligned, `value` is out of range, the timeout is not positive,
                or the owner registered the buffer as read-only.
        """
        return self._atomic(Atomic.fetch_add(value), offset, timeout)

    def compare_and_swap(
        self, expected: int, desired: int, *, offset: int = 0, timeout: float = 60.0
    ) -> FetchOperation:
        """Set the unsigned 8-byte word at `offset` to `desired` if it is `expected`, and return its previous value.

        It is atomic, and runs at most once, like `fetch_add`.

        Args:
            expected: In [-2**63, 2**64); a negative one is taken modulo 2**64.
            desired: The same.
            offset: Bytes from the start of the buffer to the word, whose address in the owner must be a multiple of 8.
            timeout: Seconds until the operation ends with `TransferTimeoutError`.

        Returns:
            The operation; its result is the word before, in [0, 2**64). The swap took place if that is `expected`.

        Raises:
            TypeError: An argument is no integer, or the timeout no number.
            ValueError: The word is out of range or not aligned, a number is out of range, the timeout is not positive,
                or the owner registered the buffer as read-only.
        """
        return self._atomic(Atomic.compare_and_swap(expected, desired), offset, timeout)

    def drop(self) -> Operation:
        """Invalidate every handle to this registration, in all processes, and release the memory. Idempotent.

        All of this is done when it returns. You can wait for the returned operation like for a transfer, but need not.

        A transfer that another process has in flight is not stopped, but ends with `BufferDroppedError`. Bytes of a
        write may still arrive until then: do not reuse memory that peers write to before they are done.

        Raises:
            DataplaneError: This process does not own the buffer, or has never registered it.
        """
        here = process.current()
        if self._owner != here.owner:
            raise DataplaneError(f"only its owner, {self._owner}, can drop this buffer")
        registration = self._registration
        if registration is None and self._handle is not None:
            registration = here.registrations.of(self._handle)
        if registration is not None:
            here.registrations.drop(registration)
        self._route = None
        return DONE

    def serialize(self) -> bytes:
        """The handle as bytes, to send to another process over an authenticated channel.

        Any process that has the handle and knows a secret of this process (see `configure`) can use it.

        Raises:
            BackendUnavailableError: No backend that is allowed and usable can export that memory.
            BufferDroppedError: It was dropped.
            ConfigurationError: There is no secret with which to sign it.
            RegistrationError: The backend failed to register the memory; or a GPU has not finished the earlier work of
                its stream within a minute, or reports an error.
        """
        return handles.join(*self._halves())

    @classmethod
    def deserialize(cls, raw: bytes | bytearray | memoryview) -> "RDMABuffer":
        """A handle from bytes. This is cheap: it connects, maps and looks up nothing.

        Raises:
            ConfigurationError: There is no secret with which to verify handles.
            DescriptorError: The bytes are not a handle of this version, were altered, or were signed with a secret that
                this process does not know.
            TypeError: They are not bytes.
        """
        return cls._from_halves(*handles.split(bytes(memoryview(raw))))

    @classmethod
    def _from_halves(cls, card: bytes, body: bytes) -> "RDMABuffer":
        handle, offset, nbytes = handles.parse(card, process.current().keys.open(card, body))
        return cls._view(handle.card.owner, None, handle, offset, nbytes)

    def __reduce__(self) -> tuple[Any, tuple[bytes, bytes]]:
        # The halves apart: pickle writes the card, one object per process, once for all handles of a message.
        return RDMABuffer._from_halves, self._halves()

    def __repr__(self) -> str:
        return f"<RDMABuffer of {self._nbytes} bytes, owned by {self._owner}>"

    def route(self) -> tuple[Peer, Remote, int]:
        """For `RDMAAction`: the route to the registration, and the offset of this buffer in it.

        Raises:
            DataplaneError: There is none.
        """
        here = process.current()
        route = self._route
        if route is None or route[0] is not here.selector:
            handle = self._home_handle() if self._owner == here.owner else self._exported_handle()
            route = self._route = (here.selector, *here.selector.route(handle))
        return route[1], route[2], self._offset

    def require_writable(self) -> None:
        """Raise ValueError if the owner allows peers only to read."""
        if not self._source().writable:
            raise ValueError(f"{self!r} was registered as read-only")

    def _copy(self, region: Any, to_remote: bool, timeout: float, *, stream: bool = False) -> Operation:
        seconds = timeout if type(timeout) is float and 0 < timeout < LONGEST_S else require_timeout(timeout)
        try:
            peer, remote, offset = self.route()
        except DataplaneError as error:
            return process.current().meter.follow(Operation.failed(error), 0, 0)
        if region.kind is not HOST or remote.handle.kind is not HOST:
            operation = _copy_in_order(peer, region, remote, offset, to_remote, seconds)
        elif stream:
            operation = peer.stream(region, remote, offset, timeout=seconds)
        else:
            operation = peer.copy(region, remote, offset, to_remote=to_remote, timeout=seconds)
        nbytes = region.nbytes
        return process.current().meter.follow(operation, 0 if to_remote else nbytes, nbytes if to_remote else 0)

    def _atomic(self, atomic: Atomic, offset: int, timeout: float) -> FetchOperation:
        begin = self._address()
        at = require_word(offset, self._nbytes, begin)
        seconds = require_timeout(timeout)
        self.require_writable()
        try:
            peer, remote, start = self.route()
        except DataplaneError as error:
            return FetchOperation.failed(error)
        return peer.atomic(remote, start + at, atomic, timeout=seconds)

    def _address(self) -> int | None:
        """Address of the buffer's first byte in its owner; None if this process knows that it was dropped."""
        if self._registration is None:
            return self._known_handle().base + self._offset
        region = self._registration.region
        return None if region is None else region.address + self._offset

    def _source(self) -> Registration | Handle:
        if self._registration is not None:
            return self._registration
        return self._known_handle()

    def _known_handle(self) -> Handle:
        if self._handle is None:
            raise DataplaneError("this buffer was never registered and has no handle")
        return self._handle

    def _home_handle(self) -> Handle:
        """A handle for use in the owner itself, which needs no backend's section."""
        if self._registration is None:
            return self._known_handle()
        return process.current().home_handle(self._registration)

    def _exported_handle(self) -> Handle:
        if self._registration is None:
            return self._known_handle()
        here = process.current()
        if self._owner != here.owner:
            raise DataplaneError(
                f"this buffer belongs to {self._owner}, from which this process was forked; let the parent pickle it"
            )
        how = (here.config, here.config.exports_all)
        if self._exported is None or self._exported[0] != how or self._registration.region is None:
            self._exported = (how, here.export(self._registration))
            here.registrations.let_out(self._registration)
        return self._exported[1]

    def _halves(self) -> tuple[bytes, bytes]:
        region = None if self._registration is None else self._registration.region
        if region is not None and region.kind is not HOST:
            require_done([*self._produced, *tensors.marks([region.device])])
            self._produced = []
        handle = self._exported_handle()
        card = handle.card.encoded
        return card, process.current().keys.seal(card, handle.body(self._offset, self._nbytes))


def _copy_in_order(
    peer: Peer, region: Region, remote: Remote, offset: int, to_remote: bool, timeout: float
) -> Operation:
    # Apart from `RDMABuffer._copy`, whose variables would be cells of this closure: 8 % of a short read.
    return begin_in_order(
        gpus_of(region, peer, remote),
        timeout,
        lambda left: peer.copy(region, remote, offset, to_remote=to_remote, timeout=left),
    )


def gpus_of(local: Region, peer: Peer, remote: Remote) -> set[int]:
    """The GPUs of this process that a copy between a region and a registration touches."""
    gpus = {local.device} if local.kind is not HOST else set()
    if remote.handle.kind is not HOST and peer.backend == "local":
        gpus.add(remote.handle.device)
    return gpus
