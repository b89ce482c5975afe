"""Registered memory.

What peers may touch has a region for each buffer, so that dropping the buffer withdraws its key. Of this side of a
copy, the region of an array or tensor is kept until its storage dies, since registering pins pages, which costs more
than moving them; a weak reference tells when, before the bytes can be given to anybody else. Memory of which nothing
tells when it dies (a bytearray) is registered for one use.
"""

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skipper.dataplane._copy import BufferView
from skipper.dataplane.backends.verbs.device import Access, Device
from skipper.dataplane.backends.verbs.dmabuf import register_cuda
from skipper.dataplane.layout import extent
from skipper.dataplane.memory import storage_of
from skipper.dataplane.regions import HOST, Region, StridedRegion

_SLOTS = 4096
_FEW = 4  # words: what one buffer needs over four rails


Span = tuple[int, int]
"""Address and length."""


class RegisteredMemory:
    """A range of memory, registered with every device in use.

    Attributes:
        address: Its first byte.
        nbytes: Its length.
        begin: Its first byte as requests count it: the address, except in a dma-buf.
        lkeys: For requests of this process, one per device.
        rkeys: For those of peers, where they are allowed.
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
        """Register a span of the kind of memory that a region lies in.

        Raises:
            RegistrationError: A device or the kernel refuses.
        """
        address, nbytes = span
        if region.kind is HOST:
            return cls.of_host(devices, address, nbytes, access, kept=kept)
        regions, begin = register_cuda(devices, address, nbytes, region.device, access)
        return cls(regions, address, nbytes, begin, kept=kept)

    def close(self) -> None:
        """Deregister. Idempotent; the last reference does it too."""
        self.open = False
        for region in self._regions:
            region.close()


class MemoryCache:
    """The regions of the devices in use. Thread-safe."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = tuple(devices)
        self._lock = threading.RLock()  # a finalizer may run below us
        self._kept: dict[tuple[int, int, Access], RegisteredMemory] = {}

    def exported(self, region: Region, *, writable: bool) -> RegisteredMemory:
        """A region for one buffer, that peers may read, and change if `writable`, until it is closed.

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
                weakref.finalize(anchor, self._forget, key).atexit = False
            return known

    def _forget(self, key: tuple[int, int, Access]) -> None:
        with self._lock:
            memory = self._kept.pop(key, None)
        if memory is not None:
            memory.close()


def _local(region: Region) -> Access:
    return Access(0) if region.readonly else Access.LOCAL_WRITE


class Words:
    """Registered room for `count` 8-byte words of a peer; given back with the last reference.

    Attributes:
        found: What has arrived, as numbers.
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
    """Gives out `Words`: few at a time from a common region, more in a region of their own. Thread-safe."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = tuple(devices)
        self._common = np.zeros(_SLOTS * _FEW, np.uint64)
        self._memory = self._registered(self._common)
        self._free = list(range(0, _SLOTS * _FEW, _FEW))

    def take(self, count: int) -> Words:
        """Room for so many words.

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
