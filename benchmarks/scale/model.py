"""How long a call to many takes, and what every node sends: a simulation of the tree with measured costs.

Every process does one thing at a time, as a Python process does, and the processes share a number of cores. A node that
receives a cast passes it on, one message after another, and then runs its own endpoint. It answers when it has the
answers of all nodes below it. A straight cast is a tree of depth 1 whose heads are all ranks.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass

from skipper.control.runtime.cast.tree import RankSpan, Tree

__all__ = ["Costs", "ModelledTraffic", "latency_us", "traffic"]

CALL_NBYTES = 42
REPLY_NBYTES = 30
CAST_NBYTES = 66
"""Bytes of a call, a reply and a cast of one segment, without segment and names: see ``control/wire/messages.py``."""
ANSWERS_NBYTES = 39
ENTRY_NBYTES = 9
"""Bytes of a message of answers, and of its entry for each answer."""
SEGMENT_NBYTES = 8
"""Bytes that each segment of a message adds: the field with its size."""

_CASTER = -1


@dataclass(frozen=True, slots=True)
class Costs:
    """What was measured, in microseconds of one core but for ``wire_us``.

    Attributes:
        call_us: time of the caster for each call, for any number of ranks.
        message_us: time of a node for each node below it: to send it the cast and to take its answer.
        rank_us: time of the caster for each rank's result.
        handle_us: time of a rank to take the cast, run the endpoint and answer.
        wire_us: from the end of sending to the beginning of receiving, during which no core is busy.
    """

    call_us: float
    message_us: float
    rank_us: float
    handle_us: float
    wire_us: float


@dataclass(frozen=True, slots=True)
class ModelledTraffic:
    """What one call to all ranks makes the processes send.

    Attributes:
        depth: links between the caster and the farthest rank.
        messages: messages of all processes together, both ways.
        caster_messages: messages that the caster sends and takes.
        most_messages: messages that the busiest rank sends and takes.
        caster_nbytes: bytes that the caster sends and takes.
        most_nbytes: bytes that the busiest rank sends and takes.
    """

    depth: int
    messages: int
    caster_messages: int
    most_messages: int
    caster_nbytes: int
    most_nbytes: int


def traffic(
    ranks: int, fanout: int | None, *, argument_nbytes: int, result_nbytes: int, text_nbytes: int
) -> ModelledTraffic:
    """Count messages and bytes.

    Args:
        ranks: how many are called.
        fanout: fan-out of the tree; None casts straight.
        argument_nbytes: size of the pickled arguments.
        result_nbytes: size of a pickled result.
        text_nbytes: size of the endpoint's name and the mesh's axes.
    """
    straight_nbytes = CALL_NBYTES + REPLY_NBYTES + text_nbytes + argument_nbytes + result_nbytes
    if fanout is None:
        return ModelledTraffic(1, 2 * ranks, 2 * ranks, 2, ranks * straight_nbytes, straight_nbytes)
    tree = Tree(ranks, fanout)
    down = CAST_NBYTES + text_nbytes + argument_nbytes

    def both_ways(span: RankSpan) -> int:
        entries = len(span) * (ENTRY_NBYTES + SEGMENT_NBYTES + result_nbytes)
        return down + ANSWERS_NBYTES + entries

    caster_nbytes = sum(map(both_ways, tree.heads))
    below = [span.below(fanout) for span in tree.span_at]
    return ModelledTraffic(
        depth=tree.depth,
        messages=2 * ranks,
        caster_messages=2 * len(tree.heads),
        most_messages=max(2 + 2 * len(spans) for spans in below),
        caster_nbytes=caster_nbytes,
        most_nbytes=max(
            both_ways(span) + sum(map(both_ways, spans)) for span, spans in zip(tree.span_at, below, strict=True)
        ),
    )


def latency_us(
    ranks: int, fanout: int | None, costs: Costs, *, cores: float | None, caster_apart: bool = False
) -> float:
    """How long a call takes from its beginning to the last result.

    Args:
        ranks: how many are called.
        fanout: fan-out of the tree; None casts straight.
        costs: what was measured.
        cores: how many cores all processes share, also a part of one; None gives each process its own.
        caster_apart: whether the caster has a core of its own in addition to these.
    """
    return _Run(Tree(ranks, fanout or max(ranks, 2)), costs, cores, caster_apart=caster_apart).run()


@dataclass(frozen=True, slots=True)
class _Task:
    """Work of one process; after it a cast goes to the node ``tells``, or the process waits for one thing less."""

    node: int
    cost_us: float
    tells: int | None = None


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A message that arrives at a process: the cast, or the answer of a node below it."""

    node: int
    answer_of: int | None = None


class _Run:
    """One call, event by event."""

    def __init__(self, tree: Tree, costs: Costs, cores: float | None, *, caster_apart: bool) -> None:
        size = len(tree.span_at)
        # A part of a core makes every task slower.
        self._slowness = 1.0 if cores is None else max(math.ceil(cores), 1) / cores
        self._tree = tree
        self._costs = costs
        self._caster_apart = caster_apart
        self._free = size + 1 if cores is None else max(math.ceil(cores), 1)
        self._queues: dict[int, deque[_Task]] = {}
        self._runnable: deque[int] = deque()
        self._busy: set[int] = set()
        # A node answers once it has its own result and an answer of each below it.
        self._missing = {position: 1 + len(span.below(tree.fanout)) for position, span in enumerate(tree.span_at)}
        self._missing[_CASTER] = len(tree.heads)
        self._events: list[tuple[float, int, _Task | _Arrival]] = []
        self._count = 0
        self._now = 0.0

    def run(self) -> float:
        """Microseconds until the caster has everything."""
        self._do(_CASTER, [_Task(_CASTER, self._costs.message_us / 2, span.first) for span in self._tree.heads])
        while self._missing[_CASTER]:
            self._now, _, event = heapq.heappop(self._events)
            if isinstance(event, _Arrival):
                self._arrive(event)
            else:
                if not self._has_own_core(event.node):
                    self._free += 1
                self._busy.discard(event.node)
                self._finish(event)
                self._offer(event.node)
            self._start()
        return self._costs.call_us * self._slowness + self._now

    def _arrive(self, arrival: _Arrival) -> None:
        node, half = arrival.node, self._costs.message_us / 2
        if arrival.answer_of is None:
            below = self._tree.span_at[node].below(self._tree.fanout)
            passed_on = [_Task(node, half, span.first) for span in below]
            self._do(node, [*passed_on, _Task(node, self._costs.handle_us)])
        else:
            results = len(self._tree.span_at[arrival.answer_of]) if node == _CASTER else 0
            self._do(node, [_Task(node, half + results * self._costs.rank_us)])

    def _finish(self, task: _Task) -> None:
        node = task.node
        if task.tells is not None:
            self._later(self._costs.wire_us, _Arrival(task.tells))
            return
        self._missing[node] -= 1
        if self._missing[node] == 0 and node != _CASTER:
            parent = self._tree.parent_of[node]
            self._later(self._costs.wire_us, _Arrival(_CASTER if parent is None else parent, node))

    def _do(self, node: int, tasks: list[_Task]) -> None:
        self._queues.setdefault(node, deque()).extend(tasks)
        self._offer(node)
        self._start()

    def _offer(self, node: int) -> None:
        if node not in self._busy and self._queues.get(node):
            self._busy.add(node)
            if self._has_own_core(node):
                self._begin(node)
            else:
                self._runnable.append(node)

    def _has_own_core(self, node: int) -> bool:
        return self._caster_apart and node == _CASTER

    def _begin(self, node: int) -> None:
        task = self._queues[node].popleft()
        self._later(task.cost_us * self._slowness, task)

    def _start(self) -> None:
        while self._free and self._runnable:
            self._free -= 1
            self._begin(self._runnable.popleft())

    def _later(self, delay_us: float, event: _Task | _Arrival) -> None:
        self._count += 1
        heapq.heappush(self._events, (self._now + delay_us, self._count, event))
