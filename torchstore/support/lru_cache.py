"""A bounded memory: what was used least recently is forgotten first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import ItemsView
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class LRUCache(Generic[K, V]):
    """The entries that were put or asked for last, up to a number of them. Not thread-safe."""

    __slots__ = ("_entries", "_limit")

    def __init__(self, limit: int) -> None:
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._limit = limit

    def get(self, key: K) -> V | None:
        """What is remembered under a key, if it still is; it counts as used."""
        value = self._entries.get(key)
        if value is not None:
            self._entries.move_to_end(key)
        return value

    def put(self, key: K, value: V) -> V:
        """Remember something; what was used least recently may have to go. Returns the value."""
        self._entries[key] = value
        self._entries.move_to_end(key)
        while len(self._entries) > self._limit:
            self._entries.popitem(last=False)
        return value

    def pop(self, key: K) -> V | None:
        """Forget an entry. Returns what it was."""
        return self._entries.pop(key, None)

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()

    def items(self) -> ItemsView[K, V]:
        """All entries, the one that was used last at the end."""
        return self._entries.items()

    @property
    def newest(self) -> V | None:
        """What was put or asked for last."""
        return next(reversed(self._entries.values()), None)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)
