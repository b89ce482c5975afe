"""The controller's account of publishers' memory: in use, idle, or freed, whole arenas and sections of them. No I/O.

Memory of a retired version is *idle*: its writer may use it for the next version, and learns that with the answer to
its next publication. An arena (memory of a volume) can also be freed, if its key is gone, its writer dead, or the
volume full.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field

from skipper.torchstore.algebra.manifest import Binding
from skipper.torchstore.algebra.sections import Section, section_id
from skipper.torchstore.protocol.messages import Retired
from skipper.torchstore.support.lru_cache import LRUCache
from skipper.torchstore.support.process import ProcessId

_REMEMBERED = 4096


class Ledger:
    """The account of one store.

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
        """Whether it was an arena that no longer exists."""
        return binding.id in self._freed

    def in_use(self, binding: Binding) -> None:
        """Note that a version uses it (again)."""
        self._idle.pop(binding.id, None)
        if binding.mode == "direct":  # put again before its writer learned that it was retired
            for told in self._unreported.values():
                told[:] = [retired for retired in told if retired.binding != binding.id]

    def idle(self, writer: ProcessId, binding: Binding) -> None:
        """Note that no version uses it. Its writer may write to it again; it is freed if the writer is dead."""
        if not self._is_alive(writer):
            self._drop(binding)
            return
        if binding.mode == "snapshot":
            self._idle[binding.id] = (writer, binding)
        self._tell(writer, Retired(binding.id, binding.volume))

    def gone(self, memory: list[tuple[ProcessId, Binding]]) -> None:
        """Take the memory of a key that is gone: its writers need not keep it for a next version."""
        for writer, binding in memory:
            self._drop(binding)
            if self._is_alive(writer):
                self._tell(writer, Retired(binding.id, binding.volume, gone=True))

    def free_idle(self, volume: str) -> None:
        """Free the idle arenas of a volume."""
        self.gone([(writer, binding) for writer, binding in self._idle.values() if binding.volume == volume])

    def part_freed(self, volume: str, stretches: tuple[str, ...]) -> None:
        """Note that memory within arenas of a volume has been given back."""
        self.clock += 1
        for stretch in stretches:
            self._freed.put(stretch, (self.clock, volume))

    def freed_since(self, clock: int, volume: str) -> tuple[str, ...]:
        """Ids of the arenas of a volume that were freed since this clock value, as far as remembered."""
        return tuple(arena for arena, (when, where) in self._freed.items() if when > clock and where == volume)

    def freed_by_volume(self) -> dict[str, list[str]]:
        """Ids of all arenas that have been freed, as far as remembered."""
        found: dict[str, list[str]] = {}
        for arena, (_, volume) in self._freed.items():
            found.setdefault(volume, []).append(arena)
        return found

    def take_retired(self, writer: ProcessId) -> tuple[Retired, ...]:
        """The retired memory that a writer does not know of yet. From now on it counts as known."""
        return tuple(self._unreported.pop(writer, ()))

    def forget(self, writer: ProcessId) -> None:
        """Forget the retired memory of a dead writer."""
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


@dataclass(slots=True)
class _Shared:
    """A shared arena.

    Attributes:
        writer: The process that wrote it.
        uses: How many keys have a version in the section at an offset: tied values have one section.
        dead: Sections whose pages must be given back.
        kept: Sections whose reader was lost; their pages stay until the arena goes.
        is_over: Whether it is not written again, since some of its pages were given back, or stay for lost readers.
    """

    binding: Binding
    writer: ProcessId
    uses: dict[int, int] = field(default_factory=dict)
    dead: dict[int, int] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)
    is_over: bool = False


class SharedArenas:
    """The account of the arenas of one store that many values share.

    A batch is written into one arena. The whole arena is idle, and may be written again, when none of its sections is
    in use. Until then the pages of dead sections go back to the system, and the arena is not written again. Sections
    begin and end at page boundaries, and values below two pages of 4 KiB travel in messages: so such an arena takes at
    most 1.5 times the bytes of the values in it.

    Args:
        ledger: The ledger of whole arenas.
        cut: Called with a volume and the `section_id` of ranges of its arenas whose pages are not needed.
    """

    def __init__(self, ledger: Ledger, cut: Callable[[str, tuple[str, ...]], None]) -> None:
        self._ledger = ledger
        self._cut = cut
        self._shared: dict[str, _Shared] = {}
        self._touched: dict[str, _Shared] = {}

    def use(self, writer: ProcessId, section: Section) -> None:
        """Note that a version of one more key is there."""
        shared = self._shared.get(section.arena.id)
        if shared is None:
            shared = self._shared[section.arena.id] = _Shared(section.arena, writer)
        shared.uses[section.offset] = shared.uses.get(section.offset, 0) + 1

    def idle(self, writer: ProcessId, binding: Binding) -> None:
        """Note that no version of a key uses it any more; the key still exists. See `Ledger.idle`."""
        if not isinstance(binding, Section):
            self._ledger.idle(writer, binding)
            return
        shared = self._let_go(binding)
        if shared is not None and shared.is_over:
            self._ledger.gone([(shared.writer, shared.binding)])
        elif shared is not None:
            self._ledger.idle(shared.writer, shared.binding)

    def gone(self, memory: Iterable[tuple[ProcessId, Binding]], spoilt: Container[str] = ()) -> None:
        """Take memory that is not written again, such as that of a deleted key. See `Ledger.gone`.

        Args:
            memory: the memory, with its writers.
            spoilt: ids of memory whose reader was lost. A reader that was only stopped finds the expected bytes there,
                or a dropped arena; never pages that were given back, which are zeros.
        """
        whole: list[tuple[ProcessId, Binding]] = []
        for writer, binding in memory:
            if not isinstance(binding, Section):
                whole.append((writer, binding))
                continue
            if binding.id in spoilt and (kept := self._shared.get(binding.arena.id)) is not None:
                kept.kept.add(binding.offset)
                kept.is_over = True
            shared = self._let_go(binding)
            if shared is not None:
                whole.append((shared.writer, shared.binding))
        self._ledger.gone(whole)

    def give_back(self) -> None:
        """Give the pages of dead sections back to the system, once for each message."""
        if not self._touched:
            return
        touched, self._touched = self._touched, {}
        for shared in touched.values():
            if not shared.uses or not shared.dead:  # the whole arena is gone by now
                continue
            shared.is_over = True
            arena = shared.binding
            names = tuple(section_id(arena.id, offset, nbytes) for offset, nbytes in _joined(shared.dead))
            shared.dead.clear()
            self._ledger.part_freed(arena.volume, names)
            self._cut(arena.volume, names)

    def clear(self) -> None:
        """The store is shut down."""
        self._shared.clear()
        self._touched.clear()

    def _let_go(self, section: Section) -> _Shared | None:
        """Note that one key less uses a section. Returns its arena if no other section of it is in use."""
        shared = self._shared.get(section.arena.id)
        if shared is None:
            return None
        left = shared.uses.get(section.offset, 0) - 1
        if left > 0:
            shared.uses[section.offset] = left
            return None
        shared.uses.pop(section.offset, None)
        if not shared.uses:
            del self._shared[section.arena.id]
            return shared
        if section.offset not in shared.kept:
            shared.dead[section.offset] = section.nbytes
            self._touched[section.arena.id] = shared
        return None


def _joined(stretches: dict[int, int]) -> Iterator[tuple[int, int]]:
    """Ranges by offset, with neighbours joined."""
    begin = end = -1
    for offset, nbytes in sorted(stretches.items()):
        if offset != end:
            if end > begin:
                yield begin, end - begin
            begin = offset
        end = offset + nbytes
    if end > begin:
        yield begin, end - begin
