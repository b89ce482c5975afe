"""Sorted keys, so that a listing takes time only for what it lists: the keys under a prefix are neighbours."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator

_BLOCK = 1024  # keys: moving half of them costs less than finding the block


class SortedKeys:
    """A set of keys in the order of their code points.

    They are kept in blocks of bounded length, so adding or removing a key moves some hundred pointers, for any number
    of keys. The keys of a prefix are neighbours, whether it means characters or whole components between dots.
    """

    __slots__ = ("_blocks", "_count", "_firsts")

    def __init__(self) -> None:
        self._blocks: list[list[str]] = []
        self._firsts: list[str] = []  # a lower bound of each block
        self._count = 0

    def add(self, key: str) -> None:
        """Add a key that is not in the set."""
        self._count += 1
        if not self._blocks:
            self._blocks.append([key])
            self._firsts.append(key)
            return
        at = self._block_of(key)
        block = self._blocks[at]
        insort(block, key)
        if key < self._firsts[at]:
            self._firsts[at] = key
        if len(block) > 2 * _BLOCK:
            self._blocks.insert(at + 1, block[_BLOCK:])
            self._firsts.insert(at + 1, block[_BLOCK])
            del block[_BLOCK:]

    def remove(self, key: str) -> None:
        """Remove a key.

        Raises:
            KeyError: It is not in the set.
        """
        at = self._block_of(key) if self._blocks else -1
        block = self._blocks[at] if self._blocks else []
        position = bisect_left(block, key)
        if position == len(block) or block[position] != key:
            raise KeyError(key)
        del block[position]
        self._count -= 1
        if not block:
            del self._blocks[at], self._firsts[at]

    def starting_with(self, prefix: str) -> Iterator[str]:
        """The keys that begin with these characters, in order. Do not change the set meanwhile."""
        for key in self.from_(prefix):
            if not key.startswith(prefix):
                return
            yield key

    def below(self, prefix: str, separators: Iterable[str]) -> Iterator[str]:
        """The key that equals the prefix, and those that continue with one of some characters, in their order."""
        if next(self.from_(prefix), None) == prefix:
            yield prefix
        for separator in separators:
            yield from self.starting_with(prefix + separator)

    def from_(self, start: str) -> Iterator[str]:
        """The keys from this one on, in order. Do not change the set meanwhile."""
        if not self._blocks:
            return
        at = self._block_of(start)
        yield from self._blocks[at][bisect_left(self._blocks[at], start) :]
        for block in self._blocks[at + 1 :]:
            yield from block

    def clear(self) -> None:
        """Remove all keys."""
        self._blocks.clear()
        self._firsts.clear()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        for block in self._blocks:
            yield from block

    def _block_of(self, key: str) -> int:
        """The block that contains a key, or would contain it."""
        return max(bisect_right(self._firsts, key) - 1, 0)
