"""The one order of what a process sends to another, whether it goes straight or down a tree.

Whoever casts numbers, for each process that it casts to, what it sends there: every cast, and whatever goes straight.
Messages that go straight say their number; that of a cast follows from the number of the cast on its route and from the
`Moves` in the headers. Where they arrive, nothing is handled before everything with a smaller number is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from skipper.control.wire.messages import Move

T = TypeVar("T")


def runs(moved: dict[int, int]) -> Iterator[Move]:
    """What was counted for single positions, as few moves as that takes."""
    first = end = by = 0
    for position, count in sorted(moved.items()):
        if position != end or count != by:
            if by:
                yield first, end, by
            first, by = position, count
        end = position + 1
    if by:
        yield first, end, by


def moved_at(moves: Iterable[Move], position: int) -> int:
    """How many other things were numbered for one position."""
    return sum(by for first, end, by in moves if first <= position < end)


class ArrivalOrder(Generic[T]):
    """What comes from one process, by its numbers. Nothing is let out before `begin`: what came before has none."""

    def __init__(self) -> None:
        self._next = 0
        self._held: dict[int, T] = {}

    def begin(self) -> None:
        """Everything without a number has come: the number 1 is next."""
        self._next = self._next or 1

    def put(self, number: int, thing: T) -> None:
        """Take what has come; nothing happens where that number has come already."""
        if number >= self._next:
            self._held.setdefault(number, thing)

    def take(self) -> T | None:
        """The next thing, if it is there; it counts as handled then."""
        thing = self._held.pop(self._next, None) if self._next else None
        if thing is not None:
            self._next += 1
        return thing

    @property
    def waits_for(self) -> int | None:
        """The number that is missing before what is there; 0 where it is the beginning. None: nothing is there."""
        return self._next if self._held and self._next not in self._held else None

    def skip(self) -> bool:
        """Do not wait any more for what is missing before the next thing that is there; False where nothing is."""
        if self._held:
            self._next = min(self._held)
        return bool(self._held)
