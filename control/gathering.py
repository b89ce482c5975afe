"""`Gatherings`: where ranks wait until all of them have come, each with what the others are to know of it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from control.errors import AbsentError

Part = int | tuple[int, int]
"""What somebody has to bring: that of a rank; or that of two ranks, which either of them may bring."""

P = TypeVar("P", bound=Part)
V = TypeVar("V")


@dataclass(slots=True)
class _Gathering(Generic[P, V]):
    """What has been brought so far.

    Attributes:
        expected: the parts.
        brought: those that are here.
        ended: set once all are here, or somebody has waited long enough.
    """

    expected: frozenset[P]
    brought: dict[P, V] = field(default_factory=dict)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_complete(self) -> bool:
        """Whether all are here."""
        return len(self.brought) == len(self.expected)


class Gatherings(Generic[P, V]):
    """Those that an actor has, by a key of their users' choice; for its event loop alone."""

    def __init__(self) -> None:
        self._open: dict[Hashable, _Gathering[P, V]] = {}

    def __len__(self) -> int:
        """How many are not over."""
        return len(self._open)

    async def gather(
        self, key: Hashable, brought: Mapping[P, V], *, expected: Collection[P], timeout_s: float
    ) -> dict[P, V]:
        """Bring some parts, and wait until all are there. Then the key is free for the next gathering.

        The first who has waited for ``timeout_s`` ends it for all who wait there. A part that is brought again
        replaces what was brought before.

        Args:
            key: of the gathering.
            brought: the parts that the caller has; maybe none.
            expected: all parts, the same for all who come.
            timeout_s: how long to wait.

        Returns:
            The parts, in the order of ``expected``.

        Raises:
            AbsentError: (a `RendezvousError`, a `TimeoutError`) some have not come in time.
            ValueError: others expect other parts, or a part is none of them.
        """
        parts = frozenset(expected)
        gathering = self._open.get(key)
        if gathering is None:
            gathering = _Gathering(parts)
        if gathering.expected != parts or not brought.keys() <= parts:
            raise ValueError(f"ranks disagree on who is to come to {key!r}")
        self._open[key] = gathering
        gathering.brought.update(brought)
        if gathering.is_complete:
            self._end(key, gathering)
        try:
            await asyncio.wait_for(gathering.ended.wait(), timeout_s)
        except TimeoutError:
            self._end(key, gathering)
        if not gathering.is_complete:
            raise AbsentError(_ranks(parts - gathering.brought.keys()), len(_ranks(parts)), timeout_s)
        return {part: gathering.brought[part] for part in expected}

    def _end(self, key: Hashable, gathering: _Gathering[P, V]) -> None:
        gathering.ended.set()
        if self._open.get(key) is gathering:
            del self._open[key]


def _ranks(parts: Collection[Part]) -> tuple[int, ...]:
    """The ranks that parts are of."""
    return tuple(sorted({rank for part in parts for rank in (part if isinstance(part, tuple) else (part,))}))
