"""Entries of state dicts that are put by themselves: ``put("m/w", value)`` overwrites the entry "w" of "m". No I/O.

A version never changes, so the value is kept under a key of its own. Whichever of the two became ready last is read: by
its key, and as a part of the newest state dict. The next whole state dict takes its place.
"""

from __future__ import annotations

from collections.abc import Mapping

from skipper.torchstore.controller.history import History
from skipper.torchstore.controller.version import Version


class Entries:
    """Which keys are entries of state dicts as well.

    Args:
        histories: Of the store, by key; looked at whenever something is asked.
    """

    def __init__(self, histories: Mapping[str, History]) -> None:
        self._histories = histories
        self._values: set[str] = set()  # keys with a slash, under which single values have been put
        self._by_state_dict: dict[str, set[str]] = {}

    def of(self, key: str) -> tuple[History, str] | None:
        """The state dict that a key names an entry of, with the entry's name."""
        end = key.rfind("/")
        while end > 0:
            history = self._histories.get(key[:end])
            if history is not None and history.holds(key[end + 1 :]):
                return history, key[end + 1 :]
            end = key.rfind("/", 0, end)
        return None

    def is_newer(self, key: str) -> bool:
        """Whether the value under a key is newer than the entry of a state dict that the key names."""
        value, entry = self._histories.get(key), self.of(key)
        return value is not None and (entry is None or _ready_as(value) > _ready_as(entry[0]))

    def overwritten(self, history: History, version: Version) -> tuple[str, ...]:
        """The names in a state dict that have been put by themselves since this version became ready."""
        names = self._by_state_dict.get(history.key)
        if not names:
            return ()
        single = {name: self._histories.get(f"{history.key}/{name}") for name in names}
        return tuple(
            sorted(name for name, value in single.items() if value is not None and _ready_as(value) > version.ready_as)
        )

    def became_ready(self, history: History) -> list[History]:
        """A version of a key is ready; a replica may have come late to it. Returns the values whose place it takes."""
        if "/" not in history.key and not self._values:
            return []
        names = history.names(with_hidden=True)
        if "" in names:
            self._note(history.key)
            return []
        values = [self._histories[key] for name in names if (key := f"{history.key}/{name}") in self._values]
        return [value for value in values if 0 < _ready_as(value) < _ready_as(history) and not value.staging]

    def forget(self, key: str) -> None:
        """Nothing is under this key any more."""
        self._values.discard(key)
        self._by_state_dict.pop(key, None)

    def clear(self) -> None:
        """The store is empty."""
        self._values.clear()
        self._by_state_dict.clear()

    def _note(self, key: str) -> None:
        end = key.rfind("/")
        if end > 0:
            self._values.add(key)
        while end > 0:
            history = self._histories.get(key[:end])
            if history is not None and key[end + 1 :] in history.names(with_hidden=True):
                self._by_state_dict.setdefault(key[:end], set()).add(key[end + 1 :])
            end = key.rfind("/", 0, end)


def _ready_as(history: History) -> int:
    return history.newest.ready_as if history.newest is not None else 0
