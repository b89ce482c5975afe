"""The controller's account of publishers' memory: in use, idle, or freed. No I/O.

Memory of a retired version is *idle*: its writer may use it for the next one, and is told so with the answer to its
next publication. An arena (memory of a volume) can also be freed, when its key is gone, its writer dead, or the volume
full.
"""

from __future__ import annotations

from collections.abc import Callable

from skipper.torchstore.algebra.manifest import Binding
from skipper.torchstore.protocol.messages import Retired
from skipper.torchstore.support.lru_cache import LRUCache
from skipper.torchstore.support.process import ProcessId

_REMEMBERED = 4096


class Ledger:
    """The account of one store.

    Args:
        free: Called with a volume and an arena of it that nobody uses any more.
        is_alive: Whether a writer may put again.

    Attributes:
        clock: How many arenas have been freed.
    """

    def __init__(
        self, free: Callable[[str, str], None], is_alive: Callable[[ProcessId], bool] = ProcessId.is_alive
    ) -> None:
        self._free = free
        self._is_alive = is_alive
        self._idle: dict[str, tuple[ProcessId, Binding]] = {}
        self._freed: LRUCache[str, tuple[int, str]] = LRUCache(_REMEMBERED)  # when (a number), and in which volume
        self.clock = 0
        self._unreported: dict[ProcessId, list[Retired]] = {}

    def is_freed(self, binding: Binding) -> bool:
        """Whether it was an arena that is not there any more."""
        return binding.id in self._freed

    def in_use(self, binding: Binding) -> None:
        """A version uses it (again)."""
        self._idle.pop(binding.id, None)
        if binding.mode == "direct":  # put again before its writer was told that it was retired
            for told in self._unreported.values():
                told[:] = [retired for retired in told if retired.binding != binding.id]

    def idle(self, writer: ProcessId, binding: Binding) -> None:
        """No version uses it. Its writer may write to it again; it is freed if the writer is dead."""
        if not self._is_alive(writer):
            self._drop(binding)
            return
        if binding.mode == "snapshot":
            self._idle[binding.id] = (writer, binding)
        self._tell(writer, Retired(binding.id, binding.volume))

    def gone(self, memory: list[tuple[ProcessId, Binding]]) -> None:
        """The memory of a key that is gone: its writers need not keep it for a next version."""
        for writer, binding in memory:
            self._drop(binding)
            if self._is_alive(writer):
                self._tell(writer, Retired(binding.id, binding.volume, gone=True))

    def free_idle(self, volume: str) -> None:
        """Free the idle arenas of a volume."""
        self.gone([(writer, binding) for writer, binding in self._idle.values() if binding.volume == volume])

    def part_freed(self, volume: str, stretches: tuple[str, ...]) -> None:
        """Memory within arenas of a volume has been given back."""
        self.clock += 1
        for stretch in stretches:
            self._freed.put(stretch, (self.clock, volume))

    def freed_since(self, clock: int, volume: str) -> tuple[str, ...]:
        """Ids of the arenas of a volume that have been freed since the clock stood so, as far as remembered."""
        return tuple(arena for arena, (when, where) in self._freed.items() if when > clock and where == volume)

    def freed_by_volume(self) -> dict[str, list[str]]:
        """Ids of all arenas that have been freed, as far as remembered."""
        found: dict[str, list[str]] = {}
        for arena, (_, volume) in self._freed.items():
            found.setdefault(volume, []).append(arena)
        return found

    def take_retired(self, writer: ProcessId) -> tuple[Retired, ...]:
        """The retired memory that a writer has not been told of yet. It counts as told from now on."""
        return tuple(self._unreported.pop(writer, ()))

    def forget(self, writer: ProcessId) -> None:
        """A dead writer is told nothing."""
        self._unreported.pop(writer, None)

    def clear(self) -> None:
        """The store is shut down."""
        self._idle.clear()
        self._freed.clear()
        self._unreported.clear()

    def _tell(self, writer: ProcessId, retired: Retired) -> None:
        self._unreported.setdefault(writer, []).append(retired)

    def _drop(self, binding: Binding) -> None:
        self._idle.pop(binding.id, None)
        if binding.mode == "snapshot":
            self.clock += 1
            self._freed.put(binding.id, (self.clock, binding.volume))
            self._free(binding.volume, binding.id)
