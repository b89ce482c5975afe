"""`Relay`: one node of a tree, in a receiver's process: what it passes down, what it answers, what it sends up.

Locks: messages that come down are handled under the lock of `Relays`, so that casts stay in order. Replies and credit
come from actors' threads and from the nodes below; they are handled under the relay's own lock, under which nothing is
called but `Sender.pass_on`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from skipper.control.model.errors import ProtocolError
from skipper.control.runtime.cast.messages import GivenAnswer, Opening, host_starts, pack_answers
from skipper.control.runtime.cast.order import moved_at
from skipper.control.runtime.cast.tree import RankSpan
from skipper.control.runtime.interfaces import Sender
from skipper.control.runtime.messages import CastPath, Mail
from skipper.control.wire.bulk import Incoming, Outgoing
from skipper.control.wire.messages import Call, Cast, Kind, Move, Payload, RouteDone
from skipper.control.wire.process_ref import ProcessRef

if TYPE_CHECKING:
    from skipper.control.runtime.actor_table import ActorTable

_SHORTEST_HOLD_S = 0.005
_LONGEST_HOLD_S = 0.1
"""How long replies wait while more come from the same subtree: as long again as the first one took, within these
limits. So replies that come one by one go up as a few messages."""

_SHORTEST_QUIET_S = 0.005
_LONGEST_QUIET_S = 0.05
_QUIET_PART = 1 / 4
"""How long they wait if no more come: this fraction of the time that they took, within these limits. So replies that
are ready do not wait for a slow rank."""

_TIMER_SLACK_S = 0.001

_REPORT_MESSAGES = 64
_REPORT_NBYTES = 4 << 20
"""Credit goes up for this many casts, or bytes, at once; see `flow`."""

_KEPT_MESSAGES = 1024
_KEPT_NBYTES = 4 << 20
"""The node's own replies that are kept until the caster is known to have them; replies beyond this go directly."""

_OWN = ""
"""The node itself, in place of the id of a node below."""

_BUCKETS = 1024
"""For how many casts the relay remembers which replies are missing; beyond that, the rest of an old cast waits for its
time."""


@dataclass(slots=True)
class _Below:
    """A node below: where it is, and up to which cast its whole subtree has handled all."""

    process: ProcessRef
    rank: int
    span: RankSpan
    done: int


@dataclass(slots=True)
class _Bucket:
    """Replies to one cast that are gathered here.

    Attributes:
        port: where the caster waits for them.
        began_s: when the cast came.
        missing: how many have not come from each node below, and from this one; nodes whose replies have all come are
            left out.
        answers: the replies that have come and not gone up.
        heard: the nodes from which replies have come since the last went up.
        leave_s: when they go up at the latest, even if more come.
        due_s: when they go up if no more come.
    """

    port: int
    began_s: float
    missing: dict[str, int]
    answers: list[GivenAnswer] = field(default_factory=list)
    heard: set[str] = field(default_factory=set)
    leave_s: float = 0.0
    due_s: float = 0.0

    def add(self, node_id: str, answers: Sequence[GivenAnswer], now: float) -> None:
        """Take answers that have come through a node."""
        took_s = now - self.began_s
        if not self.answers:
            self.leave_s = now + min(max(took_s, _SHORTEST_HOLD_S), _LONGEST_HOLD_S)
        quiet_s = min(max(took_s * _QUIET_PART, _SHORTEST_QUIET_S), _LONGEST_QUIET_S)
        self.due_s = min(now + quiet_s, self.leave_s)
        self.answers += answers
        missing = self.missing.get(node_id, 0) - len(answers)
        if missing > 0:
            self.missing[node_id] = missing
            self.heard.add(node_id)
        else:
            self.missing.pop(node_id, None)

    @property
    def may_leave(self) -> bool:
        """Whether waiting is of no use: a node below has already waited for what is missing."""
        return self.missing.keys() <= self.heard


@dataclass(frozen=True, slots=True)
class _Kept:
    """A reply of this node, where it goes, and its size."""

    port: int
    answer: GivenAnswer
    nbytes: int


@dataclass(frozen=True, slots=True)
class HeldCast:
    """A cast that is to be delivered here in its turn.

    Attributes:
        relay: the node that it has come through.
        number: of the cast on its route.
        call: for the actor.
    """

    relay: Relay
    number: int
    call: Call

    def deliver(self) -> None:
        """Give it to the actor."""
        self.relay.deliver(self)


class Relay:
    """One node.

    Args:
        sender: sends to other nodes.
        actors: take what is cast.
        loop: for the timers of waiting replies.
        opening: describes the route.
        parent: the process that sent the opening, and that passes casts on to it.
    """

    def __init__(
        self,
        sender: Sender,
        actors: ActorTable,
        loop: asyncio.AbstractEventLoop,
        opening: Opening,
        parent: ProcessRef,
    ) -> None:
        self.number = opening.route
        self.origin = opening.origin
        self.rank = opening.nodes[0][0]
        self.parent = parent
        self.below: dict[str, _Below] = {}
        for span in opening.span.below(opening.fanout, host_starts(opening.nodes, opening.span.first)):
            rank, child = opening.nodes[span.first - opening.span.first]
            self.below[child.id] = _Below(child, rank, span, opening.since)
        self.received = opening.since
        """The last cast that has come here."""
        self.delivered = opening.since
        """The last one that has been given to the actor."""
        self._closes_at: int | None = None
        """The last cast that will come down, once that is known."""
        self._sender = sender
        self._actors = actors
        self._loop = loop
        self._span = opening.span
        self._order = opening.starts[0][0]
        """The number of the last cast that has come, in the order of all that comes from the caster."""
        self._lock = threading.Lock()
        self._buckets: OrderedDict[int, _Bucket] = OrderedDict()
        self._looks_s = math.inf
        """When the loop looks for replies that are due."""
        self._came_s: OrderedDict[int, float] = OrderedDict()
        """When casts came here whose answers may be awaited."""
        self._kept: dict[int, _Kept] = {}
        """This node's replies that the caster may not have got: a reply is lost if a node on its way up dies."""
        self._kept_nbytes = 0
        self._handled = opening.since
        self._handled_ahead: set[int] = set()
        self._nbytes = 0
        self._own_done = opening.since
        self._reported = opening.since

    # Down

    def take(self, cast: Cast) -> tuple[int, HeldCast] | None:
        """Take a cast that has come, and pass it on.

        Returns:
            Its number in the order of all that comes from the caster, and the cast. None: it has come before.

        Raises:
            ProtocolError: the cast before it has not come.
        """
        if cast.number <= self.received:
            return None  # it has come on another way, too
        if cast.number != self.received + 1:
            raise ProtocolError(f"cast {cast.number} came where {self.received + 1} was to come")
        self.received = cast.number
        own = cast.call_for(self.rank)
        with self._lock:
            self._settle(cast.settled)
            if own.wants_reply and self.below:
                self._came_s[cast.number] = self._loop.time()
                if len(self._came_s) > _BUCKETS:
                    self._came_s.popitem(last=False)
        for node in self.below.values():
            self._sender.pass_on(
                node.process, cast_for(node.span, self.number, cast.number, cast.settled, cast.moves, own)
            )
        self._order += 1 + moved_at(cast.moves, self._span.first)
        return self._order, HeldCast(self, cast.number, own)

    def deliver(self, held: HeldCast) -> None:
        """Give the actor a cast, in its turn."""
        self.delivered = held.number
        self._actors.deliver(Mail(self.origin, held.call, CastPath(self, held.number)))

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come down, and all that has come has been given to the actor."""
        return self._closes_at is not None and self.delivered >= max(self._closes_at, self.received)

    def close_behind(self, number: int) -> None:
        """Note that this is the last cast that will come down."""
        self._closes_at = number

    def open_below(self, opening: Opening) -> list[ProcessRef]:
        """Send the route's opening to the nodes below; returns those that are lost."""
        below = list(self.below.values())
        return [node.process for node in below if not self._tell(node, opening)]

    def _tell(self, node: _Below, opening: Opening) -> bool:
        return self._sender.pass_on(node.process, opening.part(node.span).message())

    def reopen(self, opening: Opening, parent: ProcessRef) -> list[ProcessRef]:
        """Note that this node, or one above it, has a new parent: what was on its way up may be lost.

        Returns:
            The nodes below that are lost.
        """
        self.parent = parent
        lost = self.open_below(opening)
        with self._lock:
            for number, kept in self._kept.items():
                self._send_up(number, kept.port, [kept.answer])
            self._sender.pass_on(self.parent, RouteDone(self.number, self._reported))
        return lost

    def settle(self, number: int) -> None:
        """Forget replies up to that cast: nobody waits for them any more."""
        with self._lock:
            self._settle(number)

    def drop(self, process_id: str) -> None:
        """Pass nothing more on to a node below: it is gone, or another node passes casts on to it."""
        with self._lock:
            node = self.below.pop(process_id, None)
            if node is not None:
                self._report()
                for number, bucket in list(self._buckets.items()):
                    bucket.missing.pop(process_id, None)
                    self._go_up(number, bucket)

    # Up

    def reply(self, number: int, call: Call, kind: Kind, payload: Payload) -> bool:
        """Answer a cast through the tree; False if the answer has to go directly. From any thread."""
        if any(isinstance(segment, Outgoing | Incoming) for segment in payload):
            return False
        answer, nbytes = GivenAnswer(self.rank, kind, payload), sum(map(len, payload))
        with self._lock:
            if call.wants_reply:
                if len(self._kept) >= _KEPT_MESSAGES or self._kept_nbytes + nbytes > _KEPT_NBYTES:
                    return False  # an answer that goes directly need not be kept
                self._kept[number] = _Kept(call.reply_to, answer, nbytes)
                self._kept_nbytes += nbytes
            self._gather(number, call.reply_to, _OWN, [answer])
        return True

    def gather(self, sender_id: str, port: int, number: int, answers: list[GivenAnswer]) -> None:
        """Take replies that come from a process below; on any thread."""
        with self._lock:
            self._gather(number, port, sender_id, answers)

    def undelivered(self, process_id: str, cast: Cast, payload: Payload) -> None:
        """Answer a broadcast in place of a node below that is gone, to which it was not even sent."""
        node = self.below.get(process_id)
        if node is not None:
            self.gather(process_id, cast.reply_to, cast.number, [GivenAnswer(node.rank, Kind.FAILURE, payload)])

    def flush(self) -> None:
        """Send up all replies that wait for others."""
        with self._lock:
            for number, bucket in self._buckets.items():
                self._empty(number, bucket)

    def handled(self, number: int, nbytes: int) -> None:
        """Note that a cast has left the actor's mailbox; from any thread, in any order."""
        with self._lock:
            self._nbytes += nbytes
            self._handled_ahead.add(number)
            while self._handled + 1 in self._handled_ahead:
                self._handled += 1
                self._handled_ahead.discard(self._handled)
            if self._handled - self._own_done >= _REPORT_MESSAGES or self._nbytes >= _REPORT_NBYTES:
                self._nbytes = 0
                self._own_done = self._handled
                self._report()

    def done(self, process_id: str, number: int) -> None:
        """Note what the subtree of a node below has handled; from any thread."""
        with self._lock:
            node = self.below.get(process_id)
            if node is not None and number > node.done:
                node.done = number
                self._report()

    def _settle(self, number: int) -> None:
        while self._kept and (oldest := next(iter(self._kept))) <= number:
            self._kept_nbytes -= self._kept.pop(oldest).nbytes

    def _report(self) -> None:
        done = min([self._own_done, *(node.done for node in self.below.values())])
        if done > self._reported:
            self._reported = done
            self._sender.pass_on(self.parent, RouteDone(self.number, done))

    def _gather(self, number: int, port: int, node_id: str, answers: list[GivenAnswer]) -> None:
        now = self._loop.time()
        bucket = self._buckets.get(number)
        if bucket is None:
            missing = {_OWN: 1, **{below_id: len(node.span) for below_id, node in self.below.items()}}
            bucket = self._buckets[number] = _Bucket(port, self._came_s.pop(number, now), missing)
            if len(self._buckets) > _BUCKETS:
                self._empty(*self._buckets.popitem(last=False))
        bucket.add(node_id, answers, now)
        if any(answer.kind is Kind.FAILURE for answer in answers):
            self._empty(number, bucket)
        if not self._go_up(number, bucket) and bucket.due_s < self._looks_s:
            self._looks_s = bucket.due_s
            with contextlib.suppress(RuntimeError):  # the loop is closed: this process ends
                self._loop.call_soon_threadsafe(self._loop.call_at, bucket.due_s, self._look)

    def _go_up(self, number: int, bucket: _Bucket) -> bool:
        """Send the replies that have come if waiting is of no use; returns whether none is left to go up later."""
        if not bucket.missing:
            self._buckets.pop(number, None)
        if bucket.may_leave:
            self._empty(number, bucket)
        return not bucket.answers

    def _look(self) -> None:
        """Send up replies that have waited long enough; on the loop thread."""
        with self._lock:
            now = self._loop.time() + _TIMER_SLACK_S
            if now < self._looks_s:
                return  # another look will follow
            self._looks_s = math.inf
            for number, bucket in self._buckets.items():
                if bucket.answers and bucket.due_s <= now:
                    self._empty(number, bucket)
                elif bucket.answers:
                    self._looks_s = min(self._looks_s, bucket.due_s)
            if self._looks_s < math.inf:
                self._loop.call_at(self._looks_s, self._look)

    def _empty(self, number: int, bucket: _Bucket) -> None:
        answers, bucket.answers = bucket.answers, []
        bucket.heard.clear()
        if answers:
            self._send_up(number, bucket.port, answers)

    def _send_up(self, number: int, port: int, answers: list[GivenAnswer]) -> None:
        is_home = self.parent.id == self.origin.id
        self._sender.pass_on(self.parent, pack_answers(self.number, number, port, answers, is_home=is_home))


def cast_for(span: RankSpan, route: int, number: int, settled: int, moves: Sequence[Move], call: Call) -> Cast:
    """A cast for the node at the top of a part of the tree."""
    return Cast(
        route,
        number,
        settled,
        call.target,
        call.reply_to,
        call.method,
        call.extent,
        tuple(move for move in moves if move[0] < span.end and span.first < move[1]),
        payload=call.payload,
        trace=call.trace,
    )
