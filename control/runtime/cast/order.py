"""One order for everything that a process sends to another, directly or down a tree.

For each process that it casts to, a caster numbers what it sends there: casts and direct messages. A direct message
says its number. The number of a cast follows from its number on its route and from the `Moves` in the headers. The
receiver handles a message after all messages with smaller numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from skipper.control.wire.messages import Move

T = TypeVar("T")


def runs(moved: dict[int, int]) -> Iterator[Move]:
    """The counts of single positions as the smallest number of moves."""
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
    """How many other messages were numbered for one position."""
    return sum(by for first, end, by in moves if first <= position < end)


class ArrivalOrder(Generic[T]):
    """Messages from one process, by number. None is let out before `begin`: those that came before have no number."""

    def __init__(self) -> None:
        self._next = 0
        self._held: dict[int, T] = {}

    def begin(self) -> None:
        """Note that every message without a number has come: the number 1 is next."""
        self._next = self._next or 1

    def put(self, number: int, thing: T) -> None:
        """Take what has come; nothing happens if its number has come already."""
        if number >= self._next:
            self._held.setdefault(number, thing)

    def take(self) -> T | None:
        """The next message, if it is there; it then counts as handled."""
        thing = self._held.pop(self._next, None) if self._next else None
        if thing is not None:
            self._next += 1
        return thing

    @property
    def waits_for(self) -> int | None:
        """The number that is missing before what has come; 0 if `begin` is. None: nothing has come."""
        return self._next if self._held and self._next not in self._held else None

    def skip(self) -> None:
        """Stop waiting for what is missing before the next message that has come, if one has."""
        if self._held:
            self._next = min(self._held)
