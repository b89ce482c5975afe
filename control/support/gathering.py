"""`Gatherings`: where ranks wait until all of them have come, each with what the others are to know of it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from skipper.control.model.errors import AbsentError

V = TypeVar("V")


@dataclass(slots=True)
class _Gathering(Generic[V]):
    """What has been brought so far.

    Attributes:
        expected: the ranks.
        brought: what those have brought that are here.
        ended: set once all are here, or somebody has waited long enough, or it has failed.
        failure: why it has failed.
    """

    expected: frozenset[int]
    brought: dict[int, V] = field(default_factory=dict)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    failure: Exception | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all are here."""
        return len(self.brought) == len(self.expected)


class Gatherings(Generic[V]):
    """Those that an actor has, by a key of their users' choice; for its event loop alone."""

    def __init__(self) -> None:
        self._open: dict[Hashable, _Gathering[V]] = {}

    def __len__(self) -> int:
        """How many are not over."""
        return len(self._open)

    async def gather(
        self, key: Hashable, brought: Mapping[int, V], *, expected: Collection[int], timeout_s: float
    ) -> dict[int, V]:
        """Bring what ranks have to bring, and wait until all have. Then the key is free for the next gathering.

        The first who has waited for ``timeout_s`` ends it for all who wait there. What is brought again replaces what
        was brought before.

        Args:
            key: of the gathering.
            brought: by rank; maybe nothing.
            expected: all ranks, the same for all who come.
            timeout_s: how long to wait.

        Returns:
            What all have brought, in the order of ``expected``.

        Raises:
            AbsentError: (a `RendezvousError`, a `TimeoutError`) some have not come in time.
            ValueError: others expect other ranks, or a rank is none of them.
            Exception: what `fail` was given.
        """
        ranks = frozenset(expected)
        gathering = self._open.get(key)
        if gathering is None:
            gathering = _Gathering(ranks)
        if gathering.expected != ranks or not brought.keys() <= ranks:
            raise ValueError(f"ranks disagree on which ranks take part in {key!r}")
        self._open[key] = gathering
        gathering.brought.update(brought)
        if gathering.is_complete:
            self._end(key, gathering)
        try:
            await asyncio.wait_for(gathering.ended.wait(), timeout_s)
        except TimeoutError:
            self._end(key, gathering)
        if gathering.failure is not None:
            raise gathering.failure
        if not gathering.is_complete:
            raise AbsentError(tuple(sorted(ranks - gathering.brought.keys())), len(ranks), timeout_s)
        return {rank: gathering.brought[rank] for rank in expected}

    def fail(self, key: Hashable, failure: Exception) -> None:
        """End a gathering, if there is one under this key, with an error for all who wait there."""
        gathering = self._open.get(key)
        if gathering is not None:
            gathering.failure = failure
            self._end(key, gathering)

    def _end(self, key: Hashable, gathering: _Gathering[V]) -> None:
        gathering.ended.set()
        if self._open.get(key) is gathering:
            del self._open[key]
