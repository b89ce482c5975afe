"""Registered memory.

Memory for peers has a region for each buffer, so that dropping the buffer withdraws its key. On this side of a copy,
the region of an array or tensor is kept until its storage dies, since registering pins pages, which costs more than
moving them. A weak reference tells when the storage dies, before the bytes can be reused. Memory without such a signal
(a bytearray) is registered for one use.

GPU memory is registered as a dma-buf of the CUDA driver: the kernel's own way of sharing memory between devices. Older
systems have the module nvidia-peermem instead, with which a device address can be registered like a host address.
"""

import contextlib
import ctypes
import functools
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skipper.dataplane._copy import BufferView
from skipper.dataplane.array_ends import call_before_end
from skipper.dataplane.backends.verbs.device import Access, Device
from skipper.dataplane.errors import RegistrationError
from skipper.dataplane.identity import page_size
from skipper.dataplane.layout import extent
from skipper.dataplane.memory import storage_of
from skipper.dataplane.regions import HOST, Region, StridedRegion

_SLOTS = 4096
_FEW = 4  # words: enough for one buffer over four rails

Span = tuple[int, int]
"""Address and length."""

_DMA_BUF_SUPPORTED = 124  # CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
_DMA_BUF_FD = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
_PEERMEM = (
    Path("/sys/kernel/mm/memory_peers/nvidia-peermem"),
    Path("/sys/kernel/mm/memory_peers/nv_mem"),
    Path("/sys/module/nvidia_peermem"),
)


class RegisteredMemory:
    """A range of memory, registered with every device in use.

    Attributes:
        address: Its first byte.
        nbytes: Its length.
        begin: The address of its first byte in requests: the real address, except in a dma-buf.
        lkeys: For requests of this process, one per device.
        rkeys: For requests of peers, if these are allowed.
        open: Whether it is registered.
        kept: Whether it outlives a single use.
    """

    __slots__ = ("__weakref__", "_regions", "address", "begin", "kept", "lkeys", "nbytes", "open", "rkeys")

    def __init__(self, regions: list[Any], address: int, nbytes: int, begin: int, *, kept: bool) -> None:
        self._regions = regions
        self.address = address
        self.nbytes = nbytes
        self.begin = begin
        self.kept = kept
        self.open = True
        self.lkeys: tuple[int, ...] = tuple(region.lkey for region in regions)
        self.rkeys: tuple[int, ...] = tuple(region.rkey for region in regions)

    @classmethod
    def of_host(
        cls, devices: Sequence[Device], address: int, nbytes: int, access: Access, *, kept: bool
    ) -> "RegisteredMemory":
        """Register memory of this process.

        Raises:
            RegistrationError: A device or the kernel refuses.
        """
        regions = [device.register(address, nbytes, access) for device in devices]
        return cls(regions, address, nbytes, address, kept=kept)

    @classmethod
    def of(
        cls, devices: Sequence[Device], region: Region, span: Span, access: Access, *, kept: bool
    ) -> "RegisteredMemory":
        """Register a span in the same kind of memory as a region.

        Raises:
            RegistrationError: A device or the kernel refuses.
        """
        address, nbytes = span
        if region.kind is HOST:
            return cls.of_host(devices, address, nbytes, access, kept=kept)
        regions, begin = register_cuda(devices, address, nbytes, region.device, access)
        return cls(regions, address, nbytes, begin, kept=kept)

    def close(self) -> None:
        """Deregister. Idempotent; it also happens with the last reference."""
        self.open = False
        for region in self._regions:
            region.close()


class MemoryCache:
    """The regions of the devices in use. Thread-safe."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = tuple(devices)
        self._lock = threading.RLock()  # a finalizer may run inside of a call
        self._kept: dict[tuple[int, int, Access], RegisteredMemory] = {}

    def exported(self, region: Region, *, writable: bool) -> RegisteredMemory:
        """A region for one buffer, which peers may read, and write if `writable`, until it is closed.

        Raises:
            RegistrationError: A device or the kernel refuses.
        """
        access = _local(region) | Access.REMOTE_READ
        if writable:
            access |= Access.REMOTE_WRITE | Access.REMOTE_ATOMIC
        return RegisteredMemory.of(self._devices, region, (region.address, region.nbytes), access, kept=False)

    def local(self, region: Region) -> RegisteredMemory:
        """The region of memory that this process moves bytes to or from; peers may not touch it.

        Raises:
            RegistrationError: A device or the kernel refuses.
        """
        data = region.keep.obj if isinstance(region.keep, BufferView) else region.keep
        low, high = 0, region.nbytes
        if isinstance(region, StridedRegion):
            low, high = extent(region.shape, region.strides, region.itemsize)
        storage = storage_of(data, region)
        begin, end = region.address + low, region.address + high
        if storage.anchor is not None and storage.address <= begin and end <= storage.address + storage.nbytes:
            return self._get(region, (storage.address, storage.nbytes), storage.anchor, _local(region))
        return RegisteredMemory.of(self._devices, region, (begin, end - begin), _local(region), kept=False)

    def page(self, address: int, nbytes: int) -> RegisteredMemory:
        """A page of epoch words, readable by peers, for ever.

        Raises:
            RegistrationError: A device or the kernel refuses.
        """
        page = Region(address, nbytes, False, HOST, 0, None)
        return self._get(page, (address, nbytes), self, Access.LOCAL_WRITE | Access.REMOTE_READ)

    def _get(self, region: Region, span: Span, anchor: object, access: Access) -> RegisteredMemory:
        key = (*span, access)
        with self._lock:
            known = self._kept.get(key)
            if known is None:
                known = self._kept[key] = RegisteredMemory.of(self._devices, region, span, access, kept=True)
                call_before_end(anchor, self._forget, key)
            return known

    def _forget(self, key: tuple[int, int, Access]) -> None:
        with self._lock:
            memory = self._kept.pop(key, None)
        if memory is not None:
            memory.close()


def _local(region: Region) -> Access:
    return Access(0) if region.readonly else Access.LOCAL_WRITE


class Words:
    """Registered room for `count` 8-byte words of a peer; released with the last reference.

    Attributes:
        found: The arrived words, as numbers.
        bytes: The same, as bytes.
        address: Where the first one arrives.
        lkeys: One per device.
    """

    __slots__ = ("__weakref__", "_memory", "address", "bytes", "found", "lkeys")

    def __init__(self, found: NDArray[np.uint64], memory: RegisteredMemory) -> None:
        self.found = found
        self.bytes = found.data.cast("B")
        self.address = found.__array_interface__["data"][0]
        self.lkeys = memory.lkeys
        self._memory = memory


class WordRoom:
    """Provides `Words`: small numbers from a common region, larger ones in a region of their own. Thread-safe."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = tuple(devices)
        self._common = np.zeros(_SLOTS * _FEW, np.uint64)
        self._memory = self._registered(self._common)
        self._free = list(range(0, _SLOTS * _FEW, _FEW))

    def take(self, count: int) -> Words:
        """Room for `count` words.

        Raises:
            RegistrationError: A device or the kernel refuses.
        """
        try:
            slot = self._free.pop() if count <= _FEW else None
        except IndexError:
            slot = None
        if slot is None:
            found = np.zeros(count, np.uint64)
            return Words(found, self._registered(found))
        words = Words(self._common[slot : slot + count], self._memory)
        weakref.finalize(words, self._free.append, slot).atexit = False
        return words

    def _registered(self, array: NDArray[np.uint64]) -> RegisteredMemory:
        return RegisteredMemory.of_host(
            self._devices, array.__array_interface__["data"][0], array.nbytes, Access.LOCAL_WRITE, kept=False
        )


def register_cuda(
    devices: Sequence[Device], address: int, nbytes: int, cuda_device: int, access: Access
) -> tuple[list[Any], int]:
    """Memory regions of a range of GPU memory, one per device, and the address of its first byte in requests.

    Args:
        devices: RDMA devices to register it with.
        address: Virtual device address.
        nbytes: Length.
        cuda_device: Index of the GPU.
        access: What the regions may be used for.

    Raises:
        RegistrationError: Neither way works; says why, for each.
    """
    try:
        fd, offset = export_dmabuf(address, nbytes, cuda_device)
        try:
            return [device.register_dmabuf(fd, offset, nbytes, access) for device in devices], offset
        finally:
            os.close(fd)  # the regions keep the dma-buf itself
    except RegistrationError as error:
        obstacle = f"as a dma-buf: {error}"
    if not any(path.exists() for path in _PEERMEM):
        raise RegistrationError(f"GPU memory cannot be registered {obstacle}; the module nvidia-peermem is not loaded")
    try:
        return [device.register(address, nbytes, access) for device in devices], address
    except RegistrationError as error:
        raise RegistrationError(
            f"GPU memory cannot be registered {obstacle}; through nvidia-peermem: {error}"
        ) from error


def export_dmabuf(address: int, nbytes: int, cuda_device: int) -> tuple[int, int]:
    """A dma-buf with a range of GPU memory: its file descriptor, to be closed, and the offset of the range in it.

    Raises:
        RegistrationError: There is no CUDA driver, or it refuses.
    """
    driver = _driver()
    device, supported, fd = ctypes.c_int(-1), ctypes.c_int(0), ctypes.c_int(-1)
    _require(driver.cuDeviceGet(ctypes.byref(device), cuda_device), f"for GPU {cuda_device}")
    _require(driver.cuDeviceGetAttribute(ctypes.byref(supported), _DMA_BUF_SUPPORTED, device), "about dma-buf")
    if not supported.value:
        raise RegistrationError(f"GPU {cuda_device} does not support dma-buf (it needs the open kernel modules)")
    page = page_size()
    begin, end = address // page * page, -(-(address + nbytes) // page) * page
    span = ctypes.c_uint64(begin), ctypes.c_size_t(end - begin)
    with _context(driver, device):
        _require(
            driver.cuMemGetHandleForAddressRange(ctypes.byref(fd), *span, _DMA_BUF_FD, ctypes.c_uint64(0)),
            f"to export {nbytes} bytes",
        )
    return fd.value, address - begin


@contextlib.contextmanager
def _context(driver: Any, device: ctypes.c_int) -> Iterator[None]:
    """Set the CUDA context of torch's memory: a thread that has not used the GPU itself has none."""
    context, before = ctypes.c_void_p(), ctypes.c_void_p()
    _require(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "for a context")
    try:
        _require(driver.cuCtxPushCurrent_v2(context), "to use a context")
        try:
            yield
        finally:
            driver.cuCtxPopCurrent_v2(ctypes.byref(before))
    finally:
        driver.cuDevicePrimaryCtxRelease_v2(device)


@functools.cache
def _driver() -> Any:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuMemGetHandleForAddressRange  # noqa: B018 - of CUDA 11.7 and newer, as are all others that are used
    except (OSError, AttributeError) as error:
        raise RegistrationError(f"the CUDA driver cannot export it: {error}") from None
    _require(driver.cuInit(0), "to start")
    return driver


def _require(result: int, what: str) -> None:
    if result:
        raise RegistrationError(f"the CUDA driver fails with {result} when asked {what}")
