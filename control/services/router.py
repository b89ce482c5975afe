"""`Router`: which replica gets the next request, seen from one process. Pure: no messages, no threads, no clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skipper.control.api.service import ReplicaState
from skipper.control.runtime.begin_log import BeginView
from skipper.control.services.table import ReplicaSlot, ReplicaTable

if TYPE_CHECKING:
    from skipper.control.api.views import ActorMesh

QUEUE_NS = 50_000_000
"""How much work may wait in the mailbox of a replica. It keeps the replica busy while answers and requests travel. More
requests wait at the caller, and the next free replica gets the oldest."""

_FEWEST, _MOST = 2, 1024
"""Bounds of the number of requests that a replica has at a time, for requests of any duration."""

_SESSIONS_GO_ON = frozenset({ReplicaState.READY, ReplicaState.UPDATING, ReplicaState.UNHEALTHY, ReplicaState.DRAINING})


@dataclass(slots=True)
class Tally:
    """What one process has seen of the replicas that have had one number, over all of them.

    Attributes:
        outstanding: requests that the present one has.
        sessions: open sessions that are bound to the present one.
        done: requests that were answered, by a value or an exception of the endpoint.
        errors: those among them that were answered by an exception.
        lost: requests that it did not answer because it died; their later results are not counted here.
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
class KnownReplica:
    """One replica, as a calling process knows it.

    Attributes:
        number: its number, which its successors have, too.
        entry: the actor that takes its requests.
        tally: counts for its number.
        state: as the controller has reported it.
        is_lost: whether this process knows that it is dead, perhaps before the controller has reported it.
        is_asked_about: whether this process has asked the controller if it has lost the replica, too.
        is_out_of_reach: whether the controller can reach it, and only this process cannot.
        outstanding: requests that it has.
        in_turn: those among them that it handles one at a time.
        answered_ns: when it last answered one of those.
        sessions: open sessions that are bound to it.
        begins: where it records what it has begun; None if that cannot be read here.
    """

    number: int
    entry: ActorMesh[Any]
    tally: Tally
    state: ReplicaState
    is_lost: bool = False
    is_asked_about: bool = False
    is_out_of_reach: bool = False
    outstanding: int = 0
    in_turn: int = 0
    answered_ns: int = 0
    sessions: int = 0
    begins: BeginView | None = None

    def takes_sessions(self) -> bool:
        """Whether a session that is bound to it may continue."""
        return not self.is_lost and self.state in _SESSIONS_GO_ON


class Router:
    """The replicas of a service. Not safe to use from several threads at once.

    Args:
        prepare: called with each replica that becomes ready, before the first request goes there. It may find the
            replica lost.

    Attributes:
        limit: how many requests of those handled one at a time a replica should have: what it handles in `QUEUE_NS`.
    """

    def __init__(self, prepare: Callable[[KnownReplica, ReplicaSlot], None] = lambda replica, slot: None) -> None:
        self._prepare = prepare
        self._replicas: dict[int, KnownReplica] = {}
        """Replicas by their numbers."""
        self._ready: list[KnownReplica] = []
        self._turn = 0
        self._tallies: defaultdict[int, Tally] = defaultdict(Tally)
        self.numbers: tuple[int, ...] = ()
        """Tallies of all replicas, also of those that are down."""
        self._each_ns = QUEUE_NS // 4
        self.limit = 4

    def update(self, table: ReplicaTable) -> None:
        """Note the present replicas of the service. One that is no longer among them counts as lost."""
        replicas: dict[int, KnownReplica] = {}
        for slot in table.slots:
            if slot.entry is None:
                continue
            replica = self._replicas.get(slot.number)
            if replica is None or replica.entry.uid != slot.entry.uid:
                replica = KnownReplica(slot.number, slot.entry, self._tallies[slot.number], slot.state)
            if slot.begins is not None and replica.begins is None and not replica.is_lost:
                self._prepare(replica, slot)
            replica.state = slot.state
            replicas[slot.number] = replica
        for replica in self._replicas.values():
            replica.is_lost = replica.is_lost or replicas.get(replica.number) is not replica
        self._replicas = replicas
        self.numbers = tuple(slot.number for slot in table.slots)
        self._sort()

    def lose(self, replica: KnownReplica) -> None:
        """Note that a replica is dead."""
        replica.is_lost = True
        self._sort()

    def choose(self, *, in_turn: bool = False) -> KnownReplica | None:
        """The replica with the fewest outstanding requests, the next in turn among equals; None if there is none.

        With ``in_turn`` also None if that one has its share of the requests that it handles one at a time.
        """
        ready = self._ready
        count = len(ready)
        if not count:
            return None
        turn = self._turn = (self._turn + 1) % count
        best = ready[turn]
        fewest = best.outstanding
        for index in range(turn - count + 1, turn):  # from the next one, in a circle, to the one before
            if not fewest:
                break
            replica = ready[index]
            if replica.outstanding < fewest:
                best, fewest = replica, replica.outstanding
        return None if in_turn and best.in_turn >= self.limit else best

    def answered(self, replica: KnownReplica, begin_ns: int, now_ns: int) -> None:
        """Learn how long a replica takes for a request that it handles one at a time, from when it was sent."""
        took_ns = now_ns - max(begin_ns, replica.answered_ns)
        replica.answered_ns = now_ns
        self._each_ns += (took_ns - self._each_ns) >> 3
        self.limit = min(max(QUEUE_NS // (self._each_ns + 1), _FEWEST), _MOST)

    def choose_for_session(self) -> KnownReplica | None:
        """The replica with the fewest open sessions, and among equals the fewest requests; None if there is none."""
        return min(self._ready, key=lambda replica: (replica.sessions, replica.outstanding), default=None)

    def replica(self, number: int) -> KnownReplica | None:
        """The replica of a number, if it is not known to be dead; it may be still coming up."""
        replica = self._replicas.get(number)
        return None if replica is None or replica.is_lost else replica

    def is_out_of_reach(self, number: int | None = None) -> bool:
        """Whether a replica, or every one, is up and cannot be reached from this process, now and later."""
        if number is not None:
            return (replica := self._replicas.get(number)) is not None and replica.is_out_of_reach
        return bool(self.numbers) and all(map(self.is_out_of_reach, self.numbers))

    def has_out_of_reach(self) -> bool:
        """Whether some replica is up and cannot be reached from this process."""
        return any(replica.is_out_of_reach for replica in self._replicas.values())

    def tallies(self) -> dict[int, Tally]:
        """Counts by number of the replica, those of the present moment included."""
        for tally in self._tallies.values():
            tally.outstanding = tally.sessions = 0
        for replica in self._replicas.values():
            replica.tally.outstanding, replica.tally.sessions = replica.outstanding, replica.sessions
        return dict(self._tallies)

    def _sort(self) -> None:
        def of(state: ReplicaState) -> Iterator[KnownReplica]:
            return (replica for replica in self._replicas.values() if replica.state is state and not replica.is_lost)

        self._ready = list(of(ReplicaState.READY)) or list(of(ReplicaState.UPDATING))
