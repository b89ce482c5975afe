"""A bounded cache that drops the least recently used entry first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import ItemsView
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class LRUCache(Generic[K, V]):
    """The most recently used entries, up to a maximum number. Not thread-safe."""

    __slots__ = ("_entries", "_limit")

    def __init__(self, limit: int) -> None:
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._limit = limit

    def get(self, key: K) -> V | None:
        """The entry of a key, if there still is one; it counts as used."""
        value = self._entries.get(key)
        if value is not None:
            self._entries.move_to_end(key)
        return value

    def put(self, key: K, value: V) -> V:
        """Add an entry; the least recently used one may be dropped. Returns the value."""
        self._entries[key] = value
        self._entries.move_to_end(key)
        while len(self._entries) > self._limit:
            self._entries.popitem(last=False)
        return value

    def pop(self, key: K) -> V | None:
        """Remove an entry. Returns its value."""
        return self._entries.pop(key, None)

    def clear(self) -> None:
        """Remove all entries."""
        self._entries.clear()

    def items(self) -> ItemsView[K, V]:
        """All entries, the most recently used one at the end."""
        return self._entries.items()

    @property
    def newest(self) -> V | None:
        """The most recently used entry."""
        return next(reversed(self._entries.values()), None)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)
