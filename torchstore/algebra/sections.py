"""Sections: the parts of an arena with many values, one for each value.

For the history of its key, a section is memory like any other: in use while some version of the key is kept or read.
Sections begin and end at page boundaries, so that each can be given back to the system separately.
"""

from __future__ import annotations

import mmap
from typing import Any

from skipper.dataplane import RDMABuffer
from skipper.torchstore.algebra.manifest import Binding

SECTION_ALIGNMENT = mmap.PAGESIZE
"""In bytes: the smallest unit that can be given back to the system."""


class Section(Binding):
    """The part of a shared arena that contains one value.

    Args:
        arena: The whole arena.
        offset: The offset from its start, in bytes.
        nbytes: The size of the section, a multiple of `SECTION_ALIGNMENT`.
    """

    __slots__ = ("_buffers", "arena", "nbytes", "offset")

    def __init__(self, arena: Binding, offset: int, nbytes: int) -> None:
        self.id = section_id(arena.id, offset, nbytes)
        self.mode = arena.mode
        self.volume = arena.volume
        self.arena = arena
        self.offset = offset
        self.nbytes = nbytes
        self._buffers: tuple[RDMABuffer, ...] = ()

    @property
    def buffers(self) -> tuple[RDMABuffer, ...]:
        """The section, as the only buffer."""
        self._buffers = self._buffers or (self.arena.buffers[0].at(self.offset, self.nbytes),)
        return self._buffers

    @property
    def seal(self) -> None:
        """None: arenas have no seal."""
        return

    @property
    def arena_id(self) -> str:
        """The id of its arena."""
        return self.arena.id

    def __reduce__(self) -> tuple[Any, ...]:
        return Section, (self.arena, self.offset, self.nbytes)


def section_id(arena: str, offset: int, nbytes: int) -> str:
    """The id of a range of an arena."""
    return f"{arena}@{offset}+{nbytes}"


def open_section_id(name: str) -> tuple[str, int, int]:
    """The arena, the offset and the size that an id of `section_id` names; for the id of a whole arena, size 0."""
    arena, _, stretch = name.partition("@")
    offset, _, nbytes = stretch.partition("+")
    return arena, int(offset or 0), int(nbytes or 0)
