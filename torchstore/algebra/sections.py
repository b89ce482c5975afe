"""The parts of arenas that belong to one value each, where many values lie in one arena.

A section is memory like any other to the history of its key: in use while some version of the key is kept or read.
Sections begin and end at pages, so that each can go back to the system by itself.
"""

from __future__ import annotations

import mmap
from typing import Any

from skipper.dataplane import RDMABuffer
from skipper.torchstore.algebra.manifest import Binding

SECTION_ALIGNMENT = mmap.PAGESIZE
"""Bytes: the least that can be given back to the system."""


class Section(Binding):
    """The part of a shared arena in which one value lies.

    Args:
        arena: All of it.
        offset: Bytes from its start.
        nbytes: Of the section, a multiple of `SECTION_ALIGNMENT`.
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
        """The section alone, as the only buffer."""
        self._buffers = self._buffers or (self.arena.buffers[0].at(self.offset, self.nbytes),)
        return self._buffers

    @property
    def seal(self) -> None:
        """Arenas have none."""
        return

    @property
    def arena_id(self) -> str:
        """Of the arena in which it lies."""
        return self.arena.id

    def __reduce__(self) -> tuple[Any, ...]:
        return Section, (self.arena, self.offset, self.nbytes)


def section_id(arena: str, offset: int, nbytes: int) -> str:
    """Names a stretch of an arena."""
    return f"{arena}@{offset}+{nbytes}"


def open_section_id(name: str) -> tuple[str, int, int]:
    """The arena, the offset and the bytes that an id of `section_id` names; no bytes for that of a whole arena."""
    arena, _, stretch = name.partition("@")
    offset, _, nbytes = stretch.partition("+")
    return arena, int(offset or 0), int(nbytes or 0)
