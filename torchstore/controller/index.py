"""All keys of one store and their histories: lookup, listing, deletion. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping

from skipper.torchstore.algebra.key_names import SEPARATORS, is_below
from skipper.torchstore.algebra.listing import SortedKeys
from skipper.torchstore.algebra.manifest import Binding
from skipper.torchstore.algebra.sections import Section
from skipper.torchstore.controller.history import History, Numbers
from skipper.torchstore.controller.version import Contribution, Version
from skipper.torchstore.errors import KeyNotFoundError, StoreError
from skipper.torchstore.protocol.messages import Published, Share, Wanted
from skipper.torchstore.support.process import ProcessId

OnIdle = Callable[[ProcessId, Binding], None]
OnGone = Callable[[list[tuple[ProcessId, Binding]], Container[str]], None]
OnChange = Callable[[History], None]


class Index:
    """Histories by key.

    Args:
        on_idle: Called with memory that no version uses any more, and the process that wrote it.
        on_gone: Called with memory that must not be written again, and the ids of memory that lost readers may still
            read; when nothing is left of a key, with all memory that its versions have ever used.
        on_change: Called after every possible change of the readable value of a key.

    Attributes:
        keep: How many ready versions a key keeps if no put of it says so.
        retired: How often versions were retired to free their memory.
    """

    def __init__(self, on_idle: OnIdle, on_gone: OnGone, on_change: OnChange) -> None:
        self._histories: dict[str, History] = {}
        self._entries = Entries(self._histories)
        self._sorted = SortedKeys()
        self._with_older: dict[str, History] = {}  # histories that keep more than the newest version
        self.keep = 1
        self.retired = 0
        self._numbers = Numbers()
        self._on_idle = on_idle
        self._on_gone = on_gone
        self._on_change = on_change

    def contribute(
        self, key: str, contribution: Contribution, version: int | None, *, keep: int | None = None
    ) -> Published:
        """Add a contribution to a key.

        Raises:
            StoreError: See `History.contribute`. The memory of the contribution is idle again.
        """
        history = self._history(key)
        history.keep = keep or history.keep
        try:
            found = history.contribute(contribution, version)
        except StoreError:
            self._drop(history, contribution)
            raise
        self.settle(history)
        is_ready = found.number in history.ready
        if is_ready:
            self._supersede_entries(history)
        return Published(found.number, is_ready, found.step.index if found.step is not None else 0)

    def check_number(self, key: str, version: int | None) -> None:
        """See `History.check_number`."""
        history = self._histories.get(key)
        if history is not None:
            history.check_number(version)

    def waits_for(self, key: str) -> str:
        """What the next version of a key waits for; "" if unknown."""
        history = self._histories.get(key)
        return history.waits_for() if history is not None else ""

    def reserve(self, key: str) -> int:
        """See `History.reserve`."""
        history = self._history(key)
        number = history.reserve()
        if history.draining:
            self.settle(history)
        return number

    def find(self, wanted: Wanted) -> tuple[History, Version, str] | None:
        """The version for a request, with the name of the entry in its key; None: wait.

        Raises:
            KeyNotFoundError: The key does not exist and none is being published.
            StoreError: Its bytes are lost.
        """
        key, item = self._locate(wanted.key)
        history = self._histories.get(key)
        if history is None:
            if wanted.selector.newer_than is not None:
                return None
            raise KeyNotFoundError(wanted.key)
        version = history.select(wanted.selector)
        return None if version is None else (history, version, item)

    def overwritten(self, wanted: Wanted, history: History, version: Version, item: str) -> tuple[str, ...]:
        """The entries of the newest state dict that were put separately after it; none for an exact version."""
        if item or wanted.selector.exact is not None or version.is_plain:
            return ()
        return self._entries.overwritten(history, version)

    def rollback(self, key: str, version: int) -> None:
        """See `History.rollback`.

        Raises:
            KeyNotFoundError: There is no such key or version.
        """
        history = self._histories.get(key)
        if history is None:
            raise KeyNotFoundError(key)
        history.rollback(version)
        self.settle(history)
        self._supersede_entries(history)

    def retire_oldest(self, volume: str) -> bool:
        """Retire the oldest version in a volume that nobody reads and that is not the newest of its key, if any."""
        found = [
            (version.ready_as, version, history)
            for history in self._with_older.values()
            for version in history.idle_versions(volume)
        ]
        if not found:
            return False
        self.retired += 1
        _, oldest, _ = min(found, key=lambda entry: entry[0])
        arenas = {binding.arena_id for _, binding in oldest.bindings()}
        for _, version, history in found:  # versions of one batch go together: one alone frees only some pages
            if version is oldest or arenas.intersection(binding.arena_id for _, binding in version.bindings()):
                history.retire(version)
                self.settle(history)
        return True

    def histories(self) -> list[History]:
        """The histories of all keys."""
        return list(self._histories.values())

    def get(self, key: str) -> History | None:
        """The history of a key."""
        return self._histories.get(key)

    def finish(self, key: str, lease: int, share: Share | None, *, failed: bool) -> None:
        """Give back a lease, and perhaps offer the copy that was read."""
        history = self._histories.get(key)
        if history is not None:
            history.finish(lease, share, failed=failed)
            self.settle(history)

    def release(self, key: str, lease: int) -> None:
        """Give back a lease."""
        history = self._histories.get(key)
        if history is not None:
            history.release(lease)
            self.settle(history)

    def delete(self, keys: tuple[str, ...], *, missing_ok: bool) -> None:
        """Forget keys; an entry of a state dict can be deleted separately, and the last one deletes the rest.

        Raises:
            KeyNotFoundError: A key does not exist; none has been deleted.
        """
        absent = [key for key in keys if self._locate(key)[0] not in self._histories]
        if absent and not missing_ok:
            raise KeyNotFoundError(absent[0])
        for key in keys:
            entry, history = self._entries.of(key), self._histories.get(key)
            if history is not None:
                singly = self._entries.overwritten(history, history.newest) if history.newest is not None else ()
                self._delete([history, *(self._histories[f"{key}/{name}"] for name in singly)])
            if entry is not None:
                history, item = entry
                history.hidden.add(item)
                if not history.names():
                    self._delete([history])

    def _delete(self, histories: list[History]) -> None:
        for history in histories:
            history.delete()
            self.settle(history)

    def keys(self, prefix: str | None) -> list[str]:
        """Every key below ``prefix`` (see `is_below`), sorted; entries of state dicts as ``key/name``."""
        begin = prefix or ""
        around = (
            begin[:end] for end, letter in enumerate(begin) if letter == "/"
        )  # state dicts that may have such entries
        keys = [key for key in around if key in self._histories]
        if prefix is None or prefix.endswith(SEPARATORS):
            keys += self._sorted.starting_with(begin)
        else:
            keys += self._sorted.below(begin, SEPARATORS)
        listed = {f"{key}/{name}" if name else key for key in keys for name in self._histories[key].names()}
        return sorted(key for key in listed if is_below(key, prefix))

    def exists(self, key: str) -> bool:
        """Whether there is a ready version to read under a key."""
        history = self._histories.get(self._locate(key)[0])
        return history is not None and history.newest is not None

    def process_died(self, process: ProcessId, volumes: list[str]) -> set[str]:
        """Drop what a dead process has begun, and mark what is lost with it and its volumes.

        Returns:
            Ids of the memory that it has written and that versions still use.
        """
        kept: set[str] = set()
        concerned = [history for history in self._histories.values() if history.concerns(process, volumes)]
        for history in concerned:  # few of many: no request is answered during this
            history.process_died(process, f"{process} has died")
            for volume in volumes:
                history.volume_died(volume, f"{process} has died")
            kept.update(history.bindings_of(process))
            self.settle(history)
        return kept

    def memory_of(self, writers: Collection[ProcessId]) -> dict[ProcessId, set[str]]:
        """Ids of the memory that versions use, for each of these processes that has written some."""
        found: dict[ProcessId, set[str]] = {writer: set() for writer in writers}
        for history in self._histories.values():
            for writer, _ in history.memory.values():
                if writer in found:
                    found[writer].update(history.bindings_of(writer))
        return found

    def clear(self) -> None:
        """Forget everything, without any notification."""
        self._histories.clear()
        self._entries.clear()
        self._sorted.clear()
        self._with_older.clear()

    def _locate(self, key: str) -> tuple[str, str]:
        """The key itself, or the state dict with its entry and the entry's name; the newer of the two."""
        if "/" not in key or self._entries.is_newer(key):
            return key, ""
        entry = self._entries.of(key)
        return (key, "") if entry is None else (entry[0].key, entry[1])

    def _history(self, key: str) -> History:
        """The history of a key, made if there is none."""
        history = self._histories.get(key)
        if history is None:
            history = self._histories[key] = History(key, keep=self.keep, numbers=self._numbers)
            self._sorted.add(key)
        return history

    def _supersede_entries(self, history: History) -> None:
        """Replace separately put entries by the newest version of their state dict."""
        for value in self._entries.became_ready(history):
            value.delete()
            self.settle(value)

    def _drop(self, history: History, refused: Contribution) -> None:
        """Let the writer of a refused contribution use the memory again."""
        self.settle(history)
        for binding in refused.holders if history.key in self._histories else ():
            if not history.uses(binding.id):
                self._on_idle(refused.writer, binding)

    def settle(self, history: History) -> None:
        """Release memory that no version of a key uses any more, and the key itself if it has no versions."""
        self._on_change(history)
        idle = history.reap()
        if not history.ready and not history.staging and not history.draining and not history.steps.given_up():
            del self._histories[history.key]
            self._entries.forget(history.key)
            self._sorted.remove(history.key)
            self._with_older.pop(history.key, None)
            self._on_gone(list(history.memory.values()), history.spoilt)
            return
        if len(history.ready) > 1:
            self._with_older[history.key] = history
        elif self._with_older:
            self._with_older.pop(history.key, None)
        for writer, binding in idle:
            is_spoilt = binding.id in history.spoilt
            if is_spoilt or isinstance(binding, Section):  # its next version will be elsewhere
                history.memory.pop(binding.id, None)
                history.spoilt.discard(binding.id)
            if is_spoilt:
                self._on_gone([(writer, binding)], {binding.id})
            else:
                self._on_idle(writer, binding)


class Entries:
    """Which keys are entries of state dicts as well: ``put("m/w", value)`` overwrites the entry "w" of "m".

    A version never changes, so the value is kept under a key of its own. Readers get the one that became ready last, by
    the key and as a part of the newest state dict. The next whole state dict replaces the value.
    """

    def __init__(self, histories: Mapping[str, History]) -> None:
        self._histories = histories
        self._values: set[str] = set()  # keys with a slash that have single values
        self._by_state_dict: dict[str, set[str]] = {}

    def of(self, key: str) -> tuple[History, str] | None:
        """The state dict that contains a key's entry, with the entry's name."""
        end = key.rfind("/")
        while end > 0:
            history = self._histories.get(key[:end])
            if history is not None and history.holds(key[end + 1 :]):
                return history, key[end + 1 :]
            end = key.rfind("/", 0, end)
        return None

    def is_newer(self, key: str) -> bool:
        """Whether the value under a key is newer than the state dict entry of that name."""
        value, entry = self._histories.get(key), self.of(key)
        return value is not None and (entry is None or _ready_as(value) > _ready_as(entry[0]))

    def overwritten(self, history: History, version: Version) -> tuple[str, ...]:
        """The names in a state dict that were put separately after this version became ready."""
        names = self._by_state_dict.get(history.key)
        if not names:
            return ()
        single = {name: self._histories.get(f"{history.key}/{name}") for name in names}
        return tuple(
            sorted(name for name, value in single.items() if value is not None and _ready_as(value) > version.ready_as)
        )

    def became_ready(self, history: History) -> list[History]:
        """Note that a version of a key is ready, or has got a late replica. Returns the values that it replaces."""
        if "/" not in history.key and not self._values:
            return []
        names = history.names(with_hidden=True)
        if "" in names:
            self._note(history.key)
            return []
        values = [self._histories[key] for name in names if (key := f"{history.key}/{name}") in self._values]
        return [value for value in values if 0 < _ready_as(value) < _ready_as(history) and not value.staging]

    def forget(self, key: str) -> None:
        """Forget a key that has no values any more."""
        self._values.discard(key)
        self._by_state_dict.pop(key, None)

    def clear(self) -> None:
        """Forget everything: the store is empty."""
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
