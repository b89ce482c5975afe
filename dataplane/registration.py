"""The owner's side of a buffer: memory that peers can reach, with the epoch word that shows if it is still valid.

A registration whose handle was never sent lasts as long as the objects that hold it. A registration whose handle was
sent (`RegistrationTable.let_out`) lasts until `drop`, or until the memory itself is freed, whichever is first. So a
process that gets a handle from an actor need not know whether the actor has kept the object that made it.
"""

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from skipper.dataplane import memfd
from skipper.dataplane.arena import Arena
from skipper.dataplane.array_ends import call_before_end
from skipper.dataplane.epochs import Epoch, EpochTable
from skipper.dataplane.errors import DescriptorError
from skipper.dataplane.handle import Handle
from skipper.dataplane.memory import storage_of
from skipper.dataplane.regions import HOST, MemoryKind, Region, Storage

Key = tuple[int, int]  # token of the epoch page, slot


class Registration:
    """Memory that peers may reach.

    Attributes:
        region: The memory; None once dropped.
        storage: The allocation that it is part of.
        shared: Mapping and offset, if it is in memory that peers can map.
        writable: Whether peers may write.
        epoch: Its word.
    """

    __slots__ = ("__weakref__", "epoch", "region", "shared", "storage", "writable")

    def __init__(
        self,
        region: Region,
        storage: Storage,
        shared: tuple[memfd.Mapping, int] | None,
        epoch: Epoch,
        *,
        writable: bool,
    ) -> None:
        self.region: Region | None = region
        self.storage: Storage | None = storage
        self.shared = shared
        self.epoch = epoch
        self.writable = writable

    def __str__(self) -> str:
        return f"buffer {self.epoch.slot} of this process"


@dataclass(frozen=True, slots=True)
class _RegisteredRange:
    """Two registrations that agree in all of these are one."""

    address: int
    nbytes: int
    kind: MemoryKind
    device: int
    readonly: bool
    writable: bool

    @classmethod
    def of(cls, region: Region, *, writable: bool) -> "_RegisteredRange":
        return cls(region.address, region.nbytes, region.kind, region.device, region.readonly, writable)


@dataclass(slots=True)
class _Outside:
    """A registration whose handle was sent, described without keeping its memory alive.

    Attributes:
        range: The memory and the rights to it.
        storage_range: Address and length of the allocation.
        anchor: The object that lives as long as the allocation.
        shared: As of the registration.
        epoch: Its word.
        end: Called just before the memory is freed; detached when the registration ends before that.
    """

    range: _RegisteredRange
    storage_range: tuple[int, int]
    anchor: "weakref.ref[Any]"
    shared: tuple[memfd.Mapping, int] | None
    epoch: Epoch
    end: "weakref.finalize[Any, Any]"

    def revive(self) -> Registration | None:
        """The registration as it was, around the same memory; None if that is being freed."""
        anchor = self.anchor()
        if anchor is None:
            return None
        at = self.range
        region = Region(at.address, at.nbytes, at.readonly, at.kind, at.device, anchor)
        return Registration(region, Storage(*self.storage_range, anchor), self.shared, self.epoch, writable=at.writable)


class RegistrationTable:
    """All registrations of one process. Thread-safe."""

    def __init__(self, epochs: EpochTable, arena: Arena) -> None:
        self._epochs = epochs
        self._arena = arena
        self._lock = threading.RLock()  # re-entrant: reference callbacks may run while this thread has the lock
        self._live: dict[Key, weakref.ref[Registration]] = {}
        self._outside: dict[Key, _Outside] = {}
        self._outside_by_range: dict[_RegisteredRange, Key] = {}
        self._kept: dict[Key, Registration] = {}  # sent, for memory whose end cannot be observed
        self._endings: dict[Key, list[Callable[[], None]]] = {}
        self._disowned = False

    def disown(self) -> None:
        """In a forked child: leave every word as it is, since all words are the parent's."""
        self._disowned = True

    def __len__(self) -> int:
        return len(self._live.keys() | self._outside.keys())

    def add(self, data: Any, region: Region, *, writable: bool) -> Registration:
        """Register memory.

        Memory that was registered before, and whose handles are still valid although nothing here holds them any more,
        gets that registration again: a new buffer of the same memory in every step costs nothing.

        Raises:
            RegistrationError: The system has no memory or file descriptor left for its word.
        """
        storage = storage_of(data, region)
        with self._lock:
            key = self._outside_by_range.get(_RegisteredRange.of(region, writable=writable))
            if key is not None and key not in self._live and self._outside[key].anchor() is storage.anchor:
                registration = self._revive(key)
                if registration is not None:
                    return registration
        shared = self._arena.locate(region.address, region.nbytes) if region.kind is HOST else None
        registration = Registration(region, storage, shared, self._epochs.acquire(), writable=writable)
        with self._lock:
            self._note(registration)
        return registration

    def let_out(self, registration: Registration) -> None:
        """Note that a handle is sent: from now on the registration lasts as long as its memory."""
        key = _key(registration.epoch)
        with self._lock:
            region, storage = registration.region, registration.storage
            if key in self._outside or key in self._kept or region is None or storage is None:
                return
            if storage.anchor is None:
                self._kept[key] = registration
                return
            end = call_before_end(storage.anchor, self._memory_freed, key)
            range_ = _RegisteredRange.of(region, writable=registration.writable)
            self._outside[key] = _Outside(
                range_,
                (storage.address, storage.nbytes),
                weakref.ref(storage.anchor),
                registration.shared,
                registration.epoch,
                end,
            )
            self._outside_by_range[range_] = key

    def at_end(self, registration: Registration, callback: Callable[[], None]) -> None:
        """Call back once, from any thread, right after the registration has ended for any reason.

        For backends that hold something for it. The callback must be quick and must not raise.
        """
        with self._lock:
            self._endings.setdefault(_key(registration.epoch), []).append(callback)

    def find(self, page_token: int, slot: int) -> Registration | None:
        """The registration with that word; its epoch may differ from the handle's."""
        key = (page_token, slot)
        with self._lock:
            reference = self._live.get(key)
            registration = None if reference is None else reference()
            if registration is None and key in self._outside:
                registration = self._revive(key)
            return registration

    def of(self, handle: Handle) -> Registration | None:
        """The registration that a handle of this process is for; None if it was dropped.

        Raises:
            DescriptorError: The handle does not match what was registered under its word.
        """
        registration = self.find(handle.card.page_token, handle.slot)
        region = None if registration is None else registration.region
        if registration is None or region is None or registration.epoch.value != handle.epoch:
            return None
        claimed = handle.base, handle.total, handle.writable, handle.kind, handle.device
        if claimed != (region.address, region.nbytes, registration.writable, region.kind, region.device):
            raise DescriptorError(f"{handle} does not match what this process has registered")
        return registration

    def drop(self, registration: Registration) -> None:
        """Invalidate every handle and release the memory. Idempotent."""
        with self._lock:
            key = _key(registration.epoch)
            if self._live.pop(key, None) is None:
                return
            self._kept.pop(key, None)
            self._forget_outside(key)
            self._release(registration.epoch)
        registration.region = None
        registration.storage = None

    def _release(self, epoch: Epoch) -> None:
        self._epochs.release(epoch)
        for callback in self._endings.pop(_key(epoch), ()):
            callback()

    def _note(self, registration: Registration) -> None:
        epoch = registration.epoch
        self._live[_key(epoch)] = weakref.ref(registration, self._forgetter(epoch))

    def _revive(self, key: Key) -> Registration | None:
        registration = self._outside[key].revive()
        if registration is not None:
            self._note(registration)
        return registration

    def _forget_outside(self, key: Key) -> None:
        outside = self._outside.pop(key, None)
        if outside is not None:
            outside.end.detach()
            if self._outside_by_range.get(outside.range) == key:
                del self._outside_by_range[outside.range]

    def _memory_freed(self, key: Key) -> None:
        if self._disowned:
            return
        with self._lock:
            outside = self._outside.get(key)
            if outside is not None:
                self._forget_outside(key)
                self._live.pop(key, None)
                self._release(outside.epoch)

    def _forgetter(self, epoch: Epoch) -> Callable[[weakref.ref[Registration]], None]:
        def forget(reference: weakref.ref[Registration]) -> None:
            if self._disowned:
                return
            key = _key(epoch)
            with self._lock:
                if self._live.get(key) is reference:
                    del self._live[key]
                    if key not in self._outside:
                        self._release(epoch)

        return forget


def _key(epoch: Epoch) -> Key:
    return epoch.page.token, epoch.slot
