"""The arenas of one publisher: memory in volumes that is reused, so that a warm put sends no request for memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from skipper.dataplane import RDMAAction
from skipper.dataplane.errors import BufferDroppedError, OwnerDiedError, TransferTimeoutError
from skipper.torchstore.algebra.manifest import Binding
from skipper.torchstore.clients.remote import RemoteStore
from skipper.torchstore.errors import StoreTimeoutError
from skipper.torchstore.protocol.messages import Retired
from skipper.torchstore.support.records import Cost
from skipper.torchstore.tensors.plan import execute


@dataclass(slots=True, eq=False)
class VolumeArena:
    """Memory in a volume that only this publisher writes to.

    Attributes:
        mark: Fingerprint of the tensors that `write` copies here; () when nothing is compiled.
        write: The compiled copy.
        used: Whether it has been written before (the volume may have dropped it since).
    """

    key: str
    binding: Binding
    nbytes: int
    mark: tuple[Any, ...] = ()
    write: RDMAAction | None = None
    used: bool = False


class ArenaPool:
    """Keeps each key's arenas, idle or in use by a version.

    An arena is in use from `take` until the controller says that the versions in it are retired (`recycle`). Two are
    enough for a key that is overwritten repeatedly; readers that hold a version for long need one more for each.

    Args:
        on_retired: Called for any memory of this process that is no longer used, arenas or not.
        idle_limit: How many idle arenas of one key are kept, whatever their sizes; None: any number, of the size that
            was taken last.
    """

    def __init__(
        self, remote: RemoteStore, on_retired: Callable[[Retired], None], *, idle_limit: int | None = None
    ) -> None:
        self._remote = remote
        self._on_retired = on_retired
        self._idle_limit = idle_limit
        self._all: dict[str, VolumeArena] = {}  # by binding id
        self._of_key: dict[str, set[str]] = {}  # binding ids
        self._idle: dict[str, list[VolumeArena]] = {}  # by key

    async def take(self, key: str, nbytes: int, volume: str, timeout: float) -> VolumeArena:
        """An arena of a volume that no version uses; allocated if there is none.

        Raises:
            VolumeLostError: The volume is dead.
        """
        arena = self._idle_one(key, nbytes, volume)
        if arena is None and self._of_key.get(key):
            # All in use, as far as is known here: versions may have been retired since.
            for retired in await self._remote.reclaim(timeout):
                self._on_retired(retired)
            arena = self._idle_one(key, nbytes, volume)
        if arena is None:
            arena = VolumeArena(key, await self._remote.allocate(volume, nbytes, timeout), nbytes)
            self._all[arena.binding.id] = arena
            self._of_key.setdefault(key, set()).add(arena.binding.id)
        return arena

    def holds(self, binding: str) -> bool:
        """Whether it is the id of one of these arenas."""
        return binding in self._all

    def discard(self, binding: str) -> None:
        """The volume has dropped this arena, or is gone."""
        arena = self._all.pop(binding, None)
        if arena is None:
            return
        siblings = self._of_key[arena.key]
        siblings.discard(binding)
        if not siblings:
            del self._of_key[arena.key]
        idle = self._idle.get(arena.key, [])
        if arena in idle:
            idle.remove(arena)
        if not idle:
            self._idle.pop(arena.key, None)

    def abandon(self, arena: VolumeArena) -> None:
        """A write to this arena was aborted but may still continue: free it, so that it is not used again."""
        self.discard(arena.binding.id)
        self._remote.free(arena.binding.volume, (arena.binding.id,))

    def drop(self, binding: str) -> None:
        """An arena was written in vain: the volume frees it."""
        arena = self._all.get(binding)
        if arena is not None:
            self.abandon(arena)

    def recycle(self, retired: Retired) -> None:
        """No version uses this memory any more."""
        arena = self._all.get(retired.binding)
        if retired.gone:
            self.discard(retired.binding)
        elif arena is not None:
            self.give_back(arena)
        elif retired.volume:  # of an earlier client of this process
            self._remote.free(retired.volume, (retired.binding,))

    def give_back(self, arena: VolumeArena) -> None:
        """A taken arena is not used, or no longer used."""
        idle = self._idle.setdefault(arena.key, [])
        idle.append(arena)
        if self._idle_limit is not None and len(idle) > self._idle_limit:
            self.abandon(idle[0])

    def forget(self, key: str) -> None:
        """The key was deleted: the controller frees its arenas when no process reads them any more."""
        self._idle.pop(key, None)
        for binding in self._of_key.pop(key, ()):
            del self._all[binding]

    def lose(self, volume: str) -> None:
        """A volume is lost, and its arenas with it."""
        for arena in [arena for arena in self._all.values() if arena.binding.volume == volume]:
            self.discard(arena.binding.id)

    async def write(
        self, arena: VolumeArena, write: RDMAAction, nbytes: int, cost: Cost, timeout: float, *, fresh: bool
    ) -> None:
        """Copy into an arena; after an error it is not used again.

        Raises:
            BufferDroppedError: The volume has freed the arena, which is still part of the pool.
            VolumeLostError: The volume is dead.
            StoreTimeoutError: The copy was not done in time.
        """
        # Nothing is kept until the write is done, and then only for tensors that come again.
        arena.mark, arena.write = (), None
        try:
            with cost.spent_on("transfer"):
                await execute(write, nbytes, timeout, fresh=fresh, description=f"put {arena.key}")
        except BufferDroppedError:
            raise
        except OwnerDiedError as error:
            self.discard(arena.binding.id)
            await self._remote.volume_lost(arena.binding.volume, error, timeout)
        except TransferTimeoutError as error:
            self.abandon(arena)
            raise StoreTimeoutError(f"writing {arena.key!r}: {error}") from error
        except BaseException:
            self.abandon(arena)
            raise
        arena.used = True
        cost.nbytes += nbytes
        cost.segments += write.segments

    def _idle_one(self, key: str, nbytes: int, volume: str) -> VolumeArena | None:
        """An idle arena of the right size. Idle ones of another size are freed: the value has changed."""
        idle = self._idle.pop(key, [])
        fitting = [arena for arena in idle if arena.nbytes == nbytes]
        others = [arena for arena in idle if arena.nbytes != nbytes]
        if self._idle_limit is None:
            for arena in others:
                self.abandon(arena)
            others = []
        found = next((arena for arena in fitting if arena.binding.volume == volume), None)
        rest = others + [arena for arena in fitting if arena is not found]
        if rest:
            self._idle[key] = rest
        return found
