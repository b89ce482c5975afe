"""`Unproven`: which requests may send their bodies while nobody knows yet whom they are from. No I/O, no clock."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

R = TypeVar("R")

PATIENCE_S = 10.0
"""A request whose body has not come after this long is turned away."""

MAX_AT_ONCE = 64
"""So many bodies are taken at the same time, each of which may be as large as a message."""

MAX_OF_CONNECTION = 4
"""So many of them come by one connection; the streams of a link that have not proven themselves are as many."""

MAX_WAITING = 4096
"""So many requests wait for that; one more costs the connection with the most of them its latest."""

SLOW_S = 0.1
"""A request whose body takes longer than this loses its place to others that wait."""

MAX_PROVEN = 4096
"""So many connections are remembered on which a proof has come, the latest."""


class Unproven(Generic[R]):
    """Shares out the places at which bodies are taken; on one thread.

    Requests on a connection on which a proof has come take no place. Of the others, the peer with the fewest places has
    the next turn, and of its connections the one with the fewest. So a peer that opens connections and requests without
    end only delays itself.

    Args:
        begin: has the body of a request be taken.
        refuse: turns a request away.
        group: the peer that a connection belongs to.
    """

    def __init__(self, *, begin: Callable[[R], None], refuse: Callable[[R], None], group: Callable[[str], str]) -> None:
        self._begin = begin
        self._refuse = refuse
        self._group = group
        self._connections: dict[str, _UnprovenConnection[R]] = {}
        self._peers: dict[str, int] = {}
        """How many places each has."""
        self._until: dict[R, tuple[float, _UnprovenConnection[R]]] = {}
        """By when a body has to have come; those first that came first."""
        self._since: dict[R, float] = {}
        """Who has a place, and since when, in this order."""
        self._proven: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until)

    def came(self, request: R, name: str, now: float) -> None:
        """Take note of a request on the connection of this name."""
        if name in self._proven:
            self._proven.move_to_end(name)
            self._begin(request)
            return
        if len(self._until) >= MAX_WAITING:
            self._make_room()
        connection = self._connections.get(name)
        if connection is None:
            connection = self._connections[name] = _UnprovenConnection(name, self._group(name))
        connection.waiting.append(request)
        self._until[request] = (now + PATIENCE_S, connection)
        self._share_out(now)

    def gone(self, request: R, now: float) -> None:
        """Take note that a body has come, or that nobody wants to send it any more."""
        if self._drop(request):
            self._share_out(now)

    def proved(self, name: str) -> None:
        """Take note that a proof has come on a connection: whatever waits there may go on."""
        self._proven[name] = None
        if len(self._proven) > MAX_PROVEN:
            self._proven.popitem(last=False)
        connection = self._connections.get(name)
        if connection is not None:
            requests = (*connection.receiving, *connection.waiting)
            waiting = tuple(connection.waiting)
            for request in requests:
                self._drop(request)
            for request in waiting:
                self._begin(request)

    def sweep(self, now: float) -> float | None:
        """Turn away requests that took too long; seconds until the next look."""
        while self._until:
            request, (until, _) = next(iter(self._until.items()))
            if until > now:
                break
            self._turn_away(request)
        self._share_out(now)
        if not self._until:
            return None
        until, _ = next(iter(self._until.values()))
        return min(until - now, SLOW_S) if len(self._since) < len(self._until) else until - now

    def _share_out(self, now: float) -> None:
        while (connection := self._next()) is not None:
            if len(self._since) >= MAX_AT_ONCE and not self._make_way(connection, now):
                return
            request = connection.waiting.popleft()
            connection.receiving[request] = None
            self._peers[connection.peer] = self._peers.get(connection.peer, 0) + 1
            self._since[request] = now
            self._begin(request)

    def _next(self) -> _UnprovenConnection[R] | None:
        """Whose turn it is."""
        if len(self._since) == len(self._until):
            return None
        waiting = [
            each for each in self._connections.values() if each.waiting and len(each.receiving) < MAX_OF_CONNECTION
        ]
        return min(waiting, key=lambda each: (self._peers.get(each.peer, 0), len(each.receiving)), default=None)

    def _make_way(self, connection: _UnprovenConnection[R], now: float) -> bool:
        """Take a place from a slow one of the peer that has the most, unless that is no more than it would be here."""
        most = max(self._peers.values())
        for request, since in self._since.items():
            if now - since < SLOW_S:
                break
            holder = self._until[request][1]
            if self._peers[holder.peer] == most:
                self._turn_away(request)
                return True
        return False

    def _make_room(self) -> None:
        fullest = max(self._connections.values(), key=lambda each: len(each.waiting))
        if fullest.waiting:
            self._turn_away(fullest.waiting[-1])

    def _turn_away(self, request: R) -> None:
        if self._drop(request):
            self._refuse(request)

    def _drop(self, request: R) -> bool:
        if (found := self._until.pop(request, None)) is None:
            return False
        connection = found[1]
        if self._since.pop(request, None) is None:
            connection.waiting.remove(request)
        else:
            del connection.receiving[request]
            self._peers[connection.peer] -= 1
            if not self._peers[connection.peer]:
                del self._peers[connection.peer]
        if not connection.waiting and not connection.receiving:
            del self._connections[connection.name]
        return True


@dataclass(slots=True)
class _UnprovenConnection(Generic[R]):
    name: str
    peer: str
    waiting: deque[R] = field(default_factory=deque)
    receiving: dict[R, None] = field(default_factory=dict)
