"""A counter that pickles, on every Python."""

from __future__ import annotations


class Serial:
    """Numbers one after the other, by `next`."""

    __slots__ = ("_next",)

    def __init__(self, first: int = 1) -> None:
        self._next = first

    @property
    def upcoming(self) -> int:
        """The number that `next` will return."""
        return self._next

    def __next__(self) -> int:
        number = self._next
        self._next += 1
        return number
