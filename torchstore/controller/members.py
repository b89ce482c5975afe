"""What a store's controller remembers about its clients: their processes, and the records that they have sent."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from skipper.torchstore.algebra.manifest import Binding, Manifest
from skipper.torchstore.protocol.messages import Share, StaleClientError, UnknownIdError
from skipper.torchstore.support.lru_cache import LRUCache
from skipper.torchstore.support.process import ProcessId
from skipper.torchstore.support.serial import Serial

R = TypeVar("R", Manifest, Binding)

_REMEMBERED = 16_384  # a manifest and three bindings for each of 2,048 publishers, twice


class Members:
    """The clients of one store, by number. A number is shorter than the identity of a process."""

    def __init__(self, store_name: str) -> None:
        self._store_name = store_name
        self._processes: dict[int, ProcessId] = {}
        self._alive: set[ProcessId] = set()
        self._numbers = Serial()

    def begin(self, first: int) -> None:
        """Begin a store. Its clients have numbers from this one on."""
        self._numbers = Serial(first)

    def welcome(self, process: ProcessId) -> int:
        """Register a client. Returns its number."""
        number = next(self._numbers)
        self._processes[number] = process
        self._alive.add(process)
        return number

    @property
    def upcoming(self) -> int:
        """The number that the next client gets; those of all clients until now are lower."""
        return self._numbers.upcoming

    def holds(self, process: ProcessId) -> bool:
        """Whether a process has a client, and has not died."""
        return process in self._alive

    def processes(self) -> tuple[ProcessId, ...]:
        """The processes of all clients."""
        return tuple(dict.fromkeys(self._processes.values()))

    def process_of(self, client: int) -> ProcessId:
        """The process of a client.

        Raises:
            StaleClientError: It belongs to a store that has been shut down.
        """
        if client not in self._processes:
            raise StaleClientError(f"this client is of an earlier store {self._store_name!r}")
        return self._processes[client]

    def process_died(self, process: ProcessId) -> list[int]:
        """Note the death of a process: its later messages do not count. Returns its clients."""
        self._alive.discard(process)
        gone = [number for number, who in self._processes.items() if who == process]
        for number in gone:
            del self._processes[number]
        return gone

    def find(self, client: int) -> ProcessId | None:
        """The process of a client; None for one of an earlier store."""
        return self._processes.get(client)

    def clear(self) -> None:
        """The store is shut down."""
        self._processes.clear()
        self._alive.clear()


class KnownRecords:
    """Manifests and bindings by id: each is sent once, and a bounded number is remembered."""

    def __init__(self) -> None:
        self._known: LRUCache[str, Manifest | Binding] = LRUCache(_REMEMBERED)

    def manifest(self, given: Manifest | str | None) -> Manifest | None:
        """The manifest with an id; a whole one is remembered.

        Raises:
            UnknownIdError: It is not remembered.
        """
        return None if given is None else self._resolve(given, Manifest)

    def binding(self, given: Binding | str | None) -> Binding | None:
        """The same for a binding.

        Raises:
            UnknownIdError: It is not remembered.
        """
        return None if given is None else self._resolve(given, Binding)

    def bindings(self, given: tuple[Binding | str, ...]) -> tuple[Binding, ...]:
        """The same for several.

        Raises:
            UnknownIdError: One is not remembered.
        """
        return tuple(self._resolve(one, Binding) for one in given)

    def share(self, given: Share) -> Share | None:
        """A share with its ids replaced by the records; None: one is not remembered."""
        try:
            manifest, binding = self.manifest(given.manifest), self.binding(given.binding)
        except UnknownIdError:
            return None
        return replace(given, manifest=manifest or given.manifest, binding=binding)

    def clear(self) -> None:
        """The store is shut down."""
        self._known.clear()

    def _resolve(self, given: R | str, kind: type[R]) -> R:
        record = self._known.get(given) if isinstance(given, str) else self._known.put(given.id, given)
        if not isinstance(record, kind):
            raise UnknownIdError(given)
        return record
