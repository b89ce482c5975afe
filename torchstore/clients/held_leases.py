"""What this process reads at this moment, for a controller that takes the place of one that is gone. Thread-safe.

That one gives back every other lease: it was released by a message that nobody has heard, or granted by an answer that
did not arrive.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from threading import Condition
from typing import Any

from skipper.control import Future
from skipper.torchstore.protocol.batches import BatchGrant
from skipper.torchstore.protocol.messages import CLIENTS_BITS, Grant


class HeldLeases:
    """The leases of one process on versions of one store."""

    def __init__(self) -> None:
        self._leases: set[tuple[str, int]] = set()
        self._batches: set[int] = set()
        self._awaited: dict[Future[Any], int] = {}  # answers that are under way, and which controller's
        self._changed = Condition()

    def expect(self, answer: Future[Any], life: int) -> None:
        """An answer of the controller with the number ``life`` may grant something."""
        with self._changed:
            self._awaited[answer] = life
        answer.add_done_callback(self.take)

    def take(self, answer: Future[Any]) -> None:
        """An expected answer is there. Called by each thread that sees it; the first call counts."""
        granted: Any = ()
        with suppress(Exception):  # nothing was granted, or nobody will ever know
            granted = answer.get(0)
        with self._changed:
            if self._awaited.pop(answer, None) is None:
                return
            if isinstance(granted, BatchGrant):
                self._batches.add(granted.lease)
                self._leases.update(leases_of(granted.others.values()))
            else:
                grants = granted if isinstance(granted, tuple) else (granted,)
                self._leases.update(leases_of(grant for grant in grants if isinstance(grant, Grant)))
            self._changed.notify_all()

    def give_back(self, leases: Iterable[tuple[str, int]], batch: int = 0) -> None:
        """They are not needed any more."""
        with self._changed:
            self._leases.difference_update(leases)
            self._batches.discard(batch)

    def after(self, life: int, timeout: float) -> tuple[frozenset[tuple[str, int]], frozenset[int]]:
        """The leases that are held, with all that came from controllers up to this one; blocks until it has come.

        Raises:
            TimeoutError: It had not.
        """
        end = time.monotonic() + timeout
        with self._changed:
            while any(number <= life for number in self._awaited.values()):
                if not self._changed.wait(max(end - time.monotonic(), 0.0)):
                    raise TimeoutError(f"a lost controller still owes answers after {timeout:.3g} s")
            return frozenset(self._leases), frozenset(self._batches - {0})

    def without(
        self, leases: frozenset[tuple[str, int]], batches: frozenset[int]
    ) -> tuple[frozenset[tuple[str, int]], frozenset[int]]:
        """Those of these leases that have been given back."""
        with self._changed:
            return leases - self._leases, batches - self._batches


def leases_of(grants: Iterable[Grant]) -> tuple[tuple[str, int], ...]:
    """The leases of grants, by key and number."""
    return tuple((one.key, one.lease) for grant in grants for one in (grant, *grant.singles) if one.lease)


_held: dict[str, tuple[int, HeldLeases]] = {}


def held_of(store_name: str, client: int) -> HeldLeases:
    """Those of this process in the store that has given it this client's number; earlier ones of the name are over."""
    store = client >> CLIENTS_BITS
    found = _held.get(store_name)
    if found is None or found[0] != store:
        found = _held[store_name] = store, HeldLeases()
    return found[1]
