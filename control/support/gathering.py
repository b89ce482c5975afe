"""`Gatherings`: where ranks wait until all of them have arrived, each with a value for the others."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from skipper.control.model.errors import AbsentError

V = TypeVar("V")


@dataclass(slots=True)
class _Gathering(Generic[V]):
    """The values so far.

    Attributes:
        expected: the ranks.
        brought: the values of the ranks that have arrived.
        ended: set once all have arrived, or a rank has waited long enough, or it has failed.
        failure: why it has failed.
    """

    expected: frozenset[int]
    brought: dict[int, V] = field(default_factory=dict)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    failure: Exception | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all have arrived."""
        return len(self.brought) == len(self.expected)


class Gatherings(Generic[V]):
    """The gatherings of an actor, by a key that their users choose; for its event loop alone."""

    def __init__(self) -> None:
        self._open: dict[Hashable, _Gathering[V]] = {}

    def __len__(self) -> int:
        """How many have not ended."""
        return len(self._open)

    async def gather(
        self, key: Hashable, brought: Mapping[int, V], *, expected: Collection[int], timeout_s: float
    ) -> dict[int, V]:
        """Add the values of ranks, and wait until all have arrived. Then the key is free for the next gathering.

        The first that has waited for ``timeout_s`` ends it for all that wait there. A later value of a rank replaces
        the earlier one.

        Args:
            key: key of the gathering.
            brought: values by rank; may be empty.
            expected: all ranks, the same for all that arrive.
            timeout_s: how long to wait.

        Returns:
            The values of all, in the order of ``expected``.

        Raises:
            AbsentError: (a `RendezvousError`, a `TimeoutError`) some have not arrived in time.
            ValueError: others expect other ranks, or a rank is not among them.
            Exception: the one that `fail` got.
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
        """End a gathering, if there is one under this key, with an error for all that wait there."""
        gathering = self._open.get(key)
        if gathering is not None:
            gathering.failure = failure
            self._end(key, gathering)

    def _end(self, key: Hashable, gathering: _Gathering[V]) -> None:
        gathering.ended.set()
        if self._open.get(key) is gathering:
            del self._open[key]
