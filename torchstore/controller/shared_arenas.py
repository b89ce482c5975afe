"""The controller's account of arenas that many values share: which sections are in use, and what becomes of the others.

A batch is written into one arena. The arena as a whole is idle, and may be written again, when none of its sections is
in use. Until then the pages of those that are dead go back to the system, and the arena is not written again. Sections
begin and end at pages, and what is smaller than two pages of 4 KiB travels in messages: so an arena that is not whole
any more holds at most half as much again as the bytes of the values that live in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from skipper.torchstore.algebra.manifest import Binding
from skipper.torchstore.algebra.sections import Section, section_id
from skipper.torchstore.controller.ledger import Ledger
from skipper.torchstore.support.process import ProcessId


@dataclass(slots=True)
class _Shared:
    """A shared arena.

    Attributes:
        writer: Who has put it.
        uses: How many keys have a version in the section at an offset: tied values have one section.
        dead: Sections whose pages are to be given back.
        is_cut: Whether some have been: it is not written again.
    """

    binding: Binding
    writer: ProcessId
    uses: dict[int, int] = field(default_factory=dict)
    dead: dict[int, int] = field(default_factory=dict)
    is_cut: bool = False


class SharedArenas:
    """The account of the shared arenas of one store. No I/O.

    Args:
        ledger: Of whole arenas.
        cut: Called with a volume and the `section_id` of stretches of its arenas whose pages nobody needs.
    """

    def __init__(self, ledger: Ledger, cut: Callable[[str, tuple[str, ...]], None]) -> None:
        self._ledger = ledger
        self._cut = cut
        self._shared: dict[str, _Shared] = {}
        self._touched: dict[str, _Shared] = {}

    def use(self, writer: ProcessId, section: Section) -> None:
        """A version of one more key lies there."""
        shared = self._shared.get(section.arena.id)
        if shared is None:
            shared = self._shared[section.arena.id] = _Shared(section.arena, writer)
        shared.uses[section.offset] = shared.uses.get(section.offset, 0) + 1

    def idle(self, writer: ProcessId, binding: Binding) -> None:
        """No version of a key uses it any more; the key is still there. See `Ledger.idle`."""
        if not isinstance(binding, Section):
            self._ledger.idle(writer, binding)
            return
        shared = self._let_go(binding)
        if shared is not None and shared.is_cut:
            self._ledger.gone([(shared.writer, shared.binding)])
        elif shared is not None:
            self._ledger.idle(shared.writer, shared.binding)

    def gone(self, memory: Iterable[tuple[ProcessId, Binding]]) -> None:
        """The memory of a key that was deleted. See `Ledger.gone`."""
        whole: list[tuple[ProcessId, Binding]] = []
        for writer, binding in memory:
            if not isinstance(binding, Section):
                whole.append((writer, binding))
                continue
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
            if not shared.uses or not shared.dead:  # all of it went meanwhile
                continue
            shared.is_cut = True
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
        """One key uses a section no more. Returns its arena if no other section of it is in use."""
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
        shared.dead[section.offset] = section.nbytes
        self._touched[section.arena.id] = shared
        return None


def _joined(stretches: dict[int, int]) -> Iterator[tuple[int, int]]:
    """Stretches by offset, neighbours as one."""
    begin = end = -1
    for offset, nbytes in sorted(stretches.items()):
        if offset != end:
            if end > begin:
                yield begin, end - begin
            begin = offset
        end = offset + nbytes
    if end > begin:
        yield begin, end - begin
