"""`Subscribers`: the processes that call a service. They get changes from the controller, and send it their counts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable

from skipper.control.api.service import ReplicaMetrics, ReplicaState
from skipper.control.runtime.port import Port
from skipper.control.services.router import Tally
from skipper.control.services.table import ReplicaTable

_PATIENCE_S = 1.0
"""How long a caller has to show that it knows of a change. Otherwise it is gone, or will subscribe again."""


class Subscribers:
    """Processes that call a service. For the thread of one event loop.

    Each of them has one request open here. The next change answers it, and the caller sends the next request then. So
    the controller hears from every living caller after each change.

    Attributes:
        version: grows with every change.
    """

    def __init__(self) -> None:
        self.version = 0
        self._waiting: dict[str, Port[ReplicaTable]] = {}
        self._seen: dict[str, int] = {}
        self._tallies: dict[str, dict[int, Tally]] = {}
        self._gone: dict[int, Tally] = {}
        """The counts of callers that are gone."""
        self._waiters: list[asyncio.Future[None]] = []

    def listen(self, port: Port[ReplicaTable], caller: str, seen: int, tallies: dict[int, Tally]) -> bool:
        """Take a caller's request. True: there is a change already, so the request has to be answered now."""
        self._seen[caller] = seen
        has_news = seen < self.version
        if not has_news:
            self._waiting[caller] = port
        self.note(caller, tallies)
        return has_news

    def note(self, caller: str, tallies: dict[int, Tally]) -> None:
        """Take the counts of a caller."""
        self._tallies[caller] = tallies
        self._wake()

    def publish(self, table: Callable[[], ReplicaTable]) -> None:
        """Answer all open requests with what ``table`` returns, as a new version."""
        self.version += 1
        news = table()
        waiting, self._waiting = self._waiting, {}
        for port in waiting.values():
            port.send(news)
        self._wake()

    async def know(self, version: int) -> None:
        """Wait until every caller knows of a version. Callers that do not within `_PATIENCE_S` are forgotten."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                await self.until(lambda: all(seen >= version for seen in self._seen.values()))
                return
        for caller in [caller for caller, seen in self._seen.items() if seen < version]:
            del self._seen[caller]
            merge(self._gone, self._tallies.pop(caller), is_gone=True)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition that only a change, or a message of a caller, can make true."""
        while not condition():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def tallies(self) -> list[dict[int, Tally]]:
        """The last reported counts of each caller, and of callers that are gone."""
        return [self._gone, *self._tallies.values()]

    def sessions_of(self, number: int) -> int:
        """Open sessions that are bound to a replica."""
        return sum(tallies[number].sessions for tallies in self._tallies.values() if number in tallies)

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


def merge(into: dict[int, Tally], tallies: dict[int, Tally], *, is_gone: bool = False) -> None:
    """Add the counts of one caller; if it is gone, only those of requests that have ended."""
    for number, tally in tallies.items():
        total = into.setdefault(number, Tally())
        if not is_gone:
            total.outstanding += tally.outstanding
            total.sessions += tally.sessions
        total.done += tally.done
        total.errors += tally.errors
        total.lost += tally.lost
        total.total_ns += tally.total_ns
        total.longest_ns = max(total.longest_ns, tally.longest_ns)


def summary(number: int, state: ReplicaState, restarts: int, tallies: Iterable[dict[int, Tally]]) -> ReplicaMetrics:
    """The metrics of one replica from the counts of all callers."""
    whole: dict[int, Tally] = {}
    for each in tallies:
        merge(whole, {number: each.get(number, Tally())})
    tally = whole.get(number, Tally())
    return ReplicaMetrics(
        number,
        state,
        restarts,
        tally.outstanding,
        tally.sessions,
        tally.done,
        tally.errors,
        tally.lost,
        tally.total_ns / tally.done / 1e9 if tally.done else 0.0,
        tally.longest_ns / 1e9,
    )
