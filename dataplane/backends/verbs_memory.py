"""Registered memory.

What peers may touch has a region for each buffer, so that dropping the buffer withdraws its key. Of this side of a
copy, the region of an array or tensor is kept until its storage dies, since registering pins pages, which costs more
than moving them; a weak reference tells when, before the bytes can be given to anybody else. Memory of which nothing
tells when it dies (a bytearray) is registered for one use.
"""

import threading
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataplane._copy import BufferView
from dataplane.backends.verbs_device import Device
from dataplane.layout import extent
from dataplane.memory import Region, StridedRegion, storage_of

_SLOTS = 4096


class Memory:
    """A memory region.

    Attributes:
        address: Its first byte.
        nbytes: Its length.
        lkey: For requests of this process.
        rkey: For those of peers, where they are allowed.
        open: Whether it is registered.
        kept: Whether it outlives a single use.
    """

    __slots__ = ("__weakref__", "_region", "address", "kept", "lkey", "nbytes", "open", "rkey")

    def __init__(self, device: Device, address: int, nbytes: int, access: int, *, kept: bool) -> None:
        self._region: Any = device.register(address, nbytes, access)
        self.address = address
        self.nbytes = nbytes
        self.lkey: int = self._region.lkey
        self.rkey: int = self._region.rkey
        self.open = True
        self.kept = kept

    def close(self) -> None:
        """Deregister. Idempotent; the last reference does it too."""
        self.open = False
        self._region.close()


class MemoryCache:
    """The regions of one device. Thread-safe."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = threading.RLock()  # a finalizer may run below us
        self._kept: dict[tuple[int, int, int], Memory] = {}

    def exported(self, region: Region, *, writable: bool) -> Memory:
        """A region for one buffer, that peers may read, and write if `writable`, until it is closed.

        Raises:
            RegistrationError: The device or the kernel refuses.
        """
        access = self._device.access(local_write=not region.readonly, remote_read=True, remote_write=writable)
        return Memory(self._device, region.address, region.nbytes, access, kept=False)

    def local(self, region: Region) -> Memory:
        """The region of memory that this process moves bytes to or from; peers may not touch it.

        Raises:
            RegistrationError: The device or the kernel refuses.
        """
        data = region.keep.obj if isinstance(region.keep, BufferView) else region.keep
        low, high = 0, region.nbytes
        if isinstance(region, StridedRegion):
            low, high = extent(region.shape, region.strides, region.itemsize)
        storage = storage_of(data, region)
        access = self._device.access(local_write=not region.readonly)
        begin, end = region.address + low, region.address + high
        if storage.anchor is not None and storage.address <= begin and end <= storage.address + storage.nbytes:
            return self._get(storage.address, storage.nbytes, storage.anchor, access)
        return Memory(self._device, begin, end - begin, access, kept=False)

    def page(self, address: int, nbytes: int) -> Memory:
        """A page of epoch words, readable by peers, for ever."""
        return self._get(address, nbytes, self, self._device.access(local_write=True, remote_read=True))

    def _get(self, address: int, nbytes: int, anchor: object, access: int) -> Memory:
        key = (address, nbytes, access)
        with self._lock:
            known = self._kept.get(key)
            if known is None:
                known = Memory(self._device, address, nbytes, access, kept=anchor is not None)
                if anchor is not None:
                    self._kept[key] = known
                    weakref.finalize(anchor, self._forget, key).atexit = False
            return known

    def _forget(self, key: tuple[int, int, int]) -> None:
        with self._lock:
            memory = self._kept.pop(key, None)
        if memory is not None:
            memory.close()


class Words:
    """Registered room for `count` epoch words of a peer; given back with the last reference."""

    __slots__ = ("__weakref__", "_memory", "address", "found", "lkey")

    def __init__(self, found: NDArray[np.uint64], memory: Memory) -> None:
        self.found = found
        self.address = found.__array_interface__["data"][0]
        self.lkey = memory.lkey
        self._memory = memory


class WordRoom:
    """Gives out `Words`: single ones from a common region, more at once each in a region of their own."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._access = device.access(local_write=True)
        self._common = np.zeros(_SLOTS, np.uint64)
        self._memory = self._registered(self._common)
        self._free = list(range(_SLOTS))

    def take(self, count: int) -> Words:
        """Room for the words of so many remotes.

        Raises:
            RegistrationError: The device or the kernel refuses.
        """
        try:
            slot = self._free.pop() if count == 1 else None
        except IndexError:
            slot = None
        if slot is None:
            found = np.zeros(count, np.uint64)
            return Words(found, self._registered(found))
        words = Words(self._common[slot : slot + 1], self._memory)
        weakref.finalize(words, self._free.append, slot).atexit = False
        return words

    def _registered(self, array: NDArray[np.uint64]) -> Memory:
        return Memory(self._device, array.__array_interface__["data"][0], array.nbytes, self._access, kept=False)
