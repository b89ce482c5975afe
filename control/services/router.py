"""`Router`: which replica gets the next request, seen from one process. Pure: no messages, no threads, no clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skipper.control.api.service import ReplicaState
from skipper.control.runtime.begin_log import BeginView
from skipper.control.services.table import Place, Table

if TYPE_CHECKING:
    from skipper.control.api.views import ActorMesh

QUEUE_NS = 50_000_000
"""So much work may wait in the mailbox of a replica. It keeps the replica busy while answers and requests travel; what
is behind that waits at the caller, the oldest first, for whichever replica comes to it."""

_FEWEST, _MOST = 2, 1024
"""Requests that may be with a replica at a time, however long or short they take."""

_SESSIONS_GO_ON = frozenset({ReplicaState.READY, ReplicaState.UPDATING, ReplicaState.UNHEALTHY, ReplicaState.DRAINING})


@dataclass(slots=True)
class Tally:
    """What one process has seen of the replicas that have had one number, over all of them.

    Attributes:
        outstanding: requests that are with the present one.
        sessions: open sessions that are bound to the present one.
        done: requests that were answered, by a value or an exception of the endpoint.
        errors: those among them that were answered by an exception.
        lost: requests that it did not answer because it died; what became of them then is not counted here.
        total_ns: the time that the answered ones took, from the sending to the answer.
        longest_ns: the longest of these times.
    """

    outstanding: int = 0
    sessions: int = 0
    done: int = 0
    errors: int = 0
    lost: int = 0
    total_ns: int = 0
    longest_ns: int = 0


@dataclass(slots=True, eq=False)
class Seat:
    """One replica, as a process that calls it keeps it.

    Attributes:
        number: of the replica.
        entry: the actor that takes its requests.
        tally: counts for its number.
        state: as the keeper told.
        is_lost: whether it is known here to be dead, perhaps before the keeper has said so.
        outstanding: requests that are with it.
        in_turn: those among them that it handles one at a time.
        answered_ns: when it last answered one of those.
        sessions: open sessions that are bound to it.
        begins: where it writes down what it has begun; None where that cannot be read here.
    """

    number: int
    entry: ActorMesh[Any]
    tally: Tally
    state: ReplicaState
    is_lost: bool = False
    outstanding: int = 0
    in_turn: int = 0
    answered_ns: int = 0
    sessions: int = 0
    begins: BeginView | None = None

    def takes_sessions(self) -> bool:
        """Whether a session that is bound to it may go on."""
        return not self.is_lost and self.state in _SESSIONS_GO_ON


class Router:
    """The seats of a service. Not safe to use from several threads at once.

    Args:
        prepare: told of every seat that comes to be ready for requests, before it is chosen for one; it may find it
            lost.

    Attributes:
        limit: how many requests that are handled one at a time should be with a replica: what it handles in `QUEUE_NS`.
    """

    def __init__(self, prepare: Callable[[Seat, Place], None] = lambda seat, place: None) -> None:
        self._prepare = prepare
        self._seats: dict[int, Seat] = {}
        """By number of the replica."""
        self._ready: list[Seat] = []
        self._turn = 0
        self._tallies: defaultdict[int, Tally] = defaultdict(Tally)
        self.numbers: tuple[int, ...] = ()
        """Of all replicas, also of those that are down."""
        self._each_ns = QUEUE_NS // 4
        self.limit = 4

    def update(self, table: Table) -> None:
        """Take note of the service's present replicas. One that has gone takes no part in anything any more."""
        seats: dict[int, Seat] = {}
        for place in table.places:
            if place.entry is None:
                continue
            seat = self._seats.get(place.number)
            if seat is None or seat.entry.uid != place.entry.uid:
                seat = Seat(place.number, place.entry, self._tallies[place.number], place.state)
            if place.begins is not None and seat.begins is None and not seat.is_lost:
                self._prepare(seat, place)
            seat.state = place.state
            seats[place.number] = seat
        for seat in self._seats.values():
            seat.is_lost = seat.is_lost or seats.get(seat.number) is not seat
        self._seats = seats
        self.numbers = tuple(place.number for place in table.places)
        self._sort()

    def lose(self, seat: Seat) -> None:
        """Take note that a replica is dead."""
        seat.is_lost = True
        self._sort()

    def choose(self, *, in_turn: bool = False) -> Seat | None:
        """The replica with the fewest outstanding requests, the next in turn among equals; None if there is none.

        Args:
            in_turn: None, too, where that one has as many as it should have of those that it handles one at a time.
        """
        ready = self._ready
        count = len(ready)
        if not count:
            return None
        turn = self._turn = (self._turn + 1) % count
        best = ready[turn]
        fewest = best.outstanding
        for index in range(turn - count + 1, turn):  # from the next one round to the one before
            if not fewest:
                break
            seat = ready[index]
            if seat.outstanding < fewest:
                best, fewest = seat, seat.outstanding
        return None if in_turn and best.in_turn >= self.limit else best

    def answered(self, seat: Seat, begin_ns: int, now_ns: int) -> None:
        """Learn from an answer how long a replica takes for a request that had its turn among others.

        Args:
            seat: of the replica.
            begin_ns: when the request was sent.
            now_ns: when the answer came.
        """
        took_ns = now_ns - max(begin_ns, seat.answered_ns)
        seat.answered_ns = now_ns
        self._each_ns += (took_ns - self._each_ns) >> 3
        self.limit = min(max(QUEUE_NS // (self._each_ns + 1), _FEWEST), _MOST)

    def choose_for_session(self) -> Seat | None:
        """The replica with the fewest open sessions, and among equals the fewest requests; None if there is none."""
        return min(self._ready, key=lambda seat: (seat.sessions, seat.outstanding), default=None)

    def seat(self, number: int) -> Seat | None:
        """The replica of a number, if it is not known to be dead; it may be still coming up."""
        seat = self._seats.get(number)
        return None if seat is None or seat.is_lost else seat

    def tallies(self) -> dict[int, Tally]:
        """Counts by number of the replica, those of the present moment included."""
        for tally in self._tallies.values():
            tally.outstanding = tally.sessions = 0
        for seat in self._seats.values():
            seat.tally.outstanding, seat.tally.sessions = seat.outstanding, seat.sessions
        return dict(self._tallies)

    def _sort(self) -> None:
        def of(state: ReplicaState) -> Iterator[Seat]:
            return (seat for seat in self._seats.values() if seat.state is state and not seat.is_lost)

        self._ready = list(of(ReplicaState.READY)) or list(of(ReplicaState.UPDATING))
