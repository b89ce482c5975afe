"""`Unproven`: which requests may send their bodies before their sender is known. No I/O, no clock."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

R = TypeVar("R")

PATIENCE_S = 10.0
"""A request is turned away if its body has not come after this time."""

MAX_AT_ONCE = 64
"""How many bodies are received at the same time; each may be as large as a message."""

MAX_OF_CONNECTION = 4
"""So many of them come by one connection; the streams of a link that have not proven themselves are as many."""

MAX_WAITING = 4096
"""How many requests may wait for that; with one more, the connection with the most loses its latest."""

SLOW_S = 0.1
"""A request whose body takes longer than this loses its place to others that wait."""

MAX_PROVEN = 4096
"""How many connections with a proof are remembered: the latest ones."""


class Unproven(Generic[R]):
    """Distributes the places for receiving bodies; on one thread.

    Requests on a connection with a proof take no place. Of the others, the peer with the fewest places has the next
    turn, and of its connections the one with the fewest. So a peer that opens connections and requests without end only
    delays itself.

    Args:
        begin: starts to receive the body of a request.
        refuse: turns a request away.
        group: the peer that a connection belongs to.
    """

    def __init__(self, *, begin: Callable[[R], None], refuse: Callable[[R], None], group: Callable[[str], str]) -> None:
        self._begin = begin
        self._refuse = refuse
        self._group = group
        self._connections: dict[str, _UnprovenConnection[R]] = {}
        self._peers: dict[str, int] = {}
        """How many places each peer has."""
        self._until: dict[R, tuple[float, _UnprovenConnection[R]]] = {}
        """The deadline for each body, in the order of arrival."""
        self._since: dict[R, float] = {}
        """The requests with a place, and since when, in this order."""
        self._proven: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until)

    def came(self, request: R, name: str, now: float) -> None:
        """Note a request on the connection with this name."""
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
        """Note that a body has come, or will not come any more."""
        if self._drop(request):
            self._share_out(now)

    def proved(self, name: str) -> None:
        """Note that a proof has come on a connection: its waiting requests may continue."""
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
        """Turn away requests that took too long; returns the seconds until the next look."""
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
        """The connection with the next turn."""
        if len(self._since) == len(self._until):
            return None
        waiting = [
            each for each in self._connections.values() if each.waiting and len(each.receiving) < MAX_OF_CONNECTION
        ]
        return min(waiting, key=lambda each: (self._peers.get(each.peer, 0), len(each.receiving)), default=None)

    def _make_way(self, connection: _UnprovenConnection[R], now: float) -> bool:
        """Take a place from a slow request of the peer with the most, unless this peer would then have as many."""
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
