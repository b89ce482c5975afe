"""`Route`: one tree as its caster sees it: its members, what has been cast, and what may still be unhandled."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from skipper.control.runtime.cast.messages import Node, Opening, Start, host_starts
from skipper.control.runtime.cast.order import runs
from skipper.control.runtime.cast.relay import cast_for
from skipper.control.runtime.cast.tree import RankSpan, Tree
from skipper.control.runtime.flow_control import Window
from skipper.control.wire.messages import Call, Cast, Move
from skipper.control.wire.process_ref import ProcessRef


@dataclass(frozen=True, slots=True)
class _Sent:
    """A cast that some rank may not have handled."""

    number: int
    call: Call
    moves: Sequence[Move]
    nbytes: int


class Route:
    """The tree for the casts of one process to one mesh, or slice. `CastSender` holds its lock around every call.

    Args:
        number: unique in the job.
        caster: this process.
        members: the processes of the mesh, in rank order.
        nodes: the members that the tree leads to.
        starts: for each node, where its numbers begin.
        fanout: of the tree.
        others: all other routes of this process.

    Attributes:
        heads: by position, the nodes that the caster sends to, and the cast up to which their subtrees have handled
            all.
        position: of each process in the tree.
        gone: members that have died, or were dead from the start.
        last: the number of the last cast.
        moved: by position, how many messages, other than casts of other routes, were numbered since the last cast.
        window: for back-pressure, in casts.
        is_closed: whether it has been given up.
        is_settling: whether the receivers will be told which replies have arrived.
    """

    def __init__(
        self,
        number: int,
        caster: ProcessRef,
        members: tuple[ProcessRef, ...],
        nodes: tuple[Node, ...],
        starts: Sequence[Start],
        fanout: int,
        others: Iterable[Route],
    ) -> None:
        self.number = number
        self.members = members
        self.nodes = nodes
        self.tree = Tree(len(nodes), fanout, host_starts(nodes))
        self.position = {process.id: position for position, (_, process) in enumerate(nodes)}
        self.heads: dict[int, int] = {span.first: 0 for span in self.tree.heads}
        self.gone: list[Node] = []
        self.last = 0
        self.moved: dict[int, int] = {}
        self.window = Window()
        self.is_closed = False
        self.is_settling = False
        self._caster = caster
        self._dead: set[int] = set()
        self._buried: list[int] = []
        """Positions of dead members that may still be heads."""
        self._sent: deque[_Sent] = deque()
        self._done = 0
        self._waited_for: deque[tuple[int, int]] = deque()
        self._settled_told = 0
        self._starts = starts
        self._sent_again: dict[int, int] = {}
        """By position, the last cast that was sent again, since it was not known whether it had arrived."""
        self._seen: dict[int, int] = {other.number: other.last for other in others}
        """By route, the last cast of other routes that is counted in."""
        self._common: dict[int, list[RankSpan]] = {}

    def opening(self, span: RankSpan) -> Opening:
        """The first message for the node at the top of a subtree."""
        part = slice(span.first, span.end)
        nodes, starts = self.nodes[part], self._starts[part]
        return Opening(self.number, self._caster, self.tree.fanout, span, self._done, nodes, starts)

    def cast(
        self,
        call: Call,
        others: Iterable[Route],
        nbytes: int,
        is_open: Callable[[int], bool],
    ) -> None:
        """Number a cast and remember it; `newest` then returns what to send.

        Args:
            call: the message for all.
            others: all routes of this process: what was cast there before stays before.
            nbytes: its size.
            is_open: whether a reply is awaited at a port.
        """
        self.last += 1
        moves = list(runs(self.moved)) if self.moved else []
        self.moved.clear()
        for other in others:
            if other is not self and (by := self._news_of(other)):
                moves += [(span.first, span.end, by) for span in self._common_with(other)]
        self._waited_for.append((self.last, call.reply_to if call.wants_reply else 0))
        self._settled_told = self.settled(is_open)
        self._sent.append(_Sent(self.last, call, moves, nbytes))
        if not self.heads:
            self._trim()

    def newest(self, span: RankSpan) -> Cast:
        """The last cast, for a subtree."""
        return self._for(self._sent[-1], span)

    def unfinished(self, span: RankSpan) -> list[Cast]:
        """All casts that the subtree may not have got, and that must be sent again."""
        self._sent_again[span.first] = self.last
        return [self._for(sent, span) for sent in self._sent]

    def may_have_come(self, process_id: str, number: int) -> bool:
        """Whether a node may have had a cast before it was sent to that node again."""
        position = self.position.get(process_id)
        return position is not None and number <= self._sent_again.get(position, 0)

    def _for(self, sent: _Sent, span: RankSpan) -> Cast:
        return cast_for(span, self.number, sent.number, self._settled_told, sent.moves, sent.call)

    def _common_with(self, other: Route) -> list[RankSpan]:
        """The positions whose processes are also in another route."""
        common = self._common.get(other.number)
        if common is None:
            common = self._common[other.number] = []
            for position, (_, process) in enumerate(self.nodes):
                if process.id not in other.position:
                    continue
                if common and common[-1].end == position:
                    common[-1] = RankSpan(common[-1].first, position + 1)
                else:
                    common.append(RankSpan(position, position + 1))
        return common

    def _news_of(self, other: Route) -> int:
        """How many casts another route has had since the last look at it."""
        by = other.last - self._seen.get(other.number, 0)
        if by:
            self._seen[other.number] = other.last
        return by

    def absorb(self, other: Route) -> None:
        """Count in the casts of another route, which is given up."""
        if by := self._news_of(other):
            for span in self._common_with(other):
                for position in range(span.first, span.end):
                    self.moved[position] = self.moved.get(position, 0) + by
        self._seen.pop(other.number, None)
        self._common.pop(other.number, None)

    def settled(self, is_open: Callable[[int], bool]) -> int:
        """The cast up to which no reply is awaited any more; ``is_open`` tells whether one is awaited at a port."""
        while self._waited_for and not (self._waited_for[0][1] and is_open(self._waited_for[0][1])):
            self._waited_for.popleft()
        return self._waited_for[0][0] - 1 if self._waited_for else self.last

    def news_of_settled(self, is_open: Callable[[int], bool]) -> int | None:
        """That number if it has grown since it was last sent."""
        settled = self.settled(is_open)
        if settled == self._settled_told:
            return None
        self._settled_told = settled
        return settled

    @property
    def waits(self) -> bool:
        """Whether replies were still awaited at the last look."""
        return bool(self._waited_for)

    def done(self, process_id: str, number: int) -> None:
        """Note that the subtree of a head has handled all casts up to a number."""
        position = self.position.get(process_id)
        if position is not None and number > self.heads.get(position, number):
            self.heads[position] = number
            self._trim()

    def bury(self, process_id: str) -> tuple[ProcessRef | None, list[RankSpan]]:
        """Remove a node that is gone.

        Returns:
            The process that must pass nothing more on to it, and the subtrees that the caster sends to from now on.
        """
        position = self.position[process_id]
        self._dead.add(position)
        self._buried.append(position)
        self.gone.append(self.nodes[position])
        return self._parent(position), self._adopt_below(position)

    def adopt(self, process_id: str) -> tuple[ProcessRef | None, list[RankSpan]]:
        """Send to a node that has lost its parent; returns as `bury` does."""
        position = self.position.get(process_id)
        if position is None or position in self.heads or position in self._dead:
            return None, []
        parent = self._parent(position)
        self.heads[position] = self._done
        return parent, [self.tree.span_at[position]]

    def after_burial(self) -> None:
        """Find out what is done, once every node has been adopted."""
        for position in self._buried:  # a node that died before is no head: no one adopts it
            self.heads.pop(position, None)
        self._buried.clear()
        self._trim()

    def close(self) -> None:
        """Give it up; callers that wait for room in it look again."""
        self.is_closed = True
        self.window.leave(self.window.count, self.window.nbytes)

    def _parent(self, position: int) -> ProcessRef | None:
        parent = self.tree.parent_of[position]
        if position in self.heads or parent is None or parent in self._dead:
            return None
        return self.nodes[parent][1]

    def _adopt_below(self, position: int) -> list[RankSpan]:
        adopted = []
        for span in self.tree.below(position):
            if span.first in self._dead:
                adopted += self._adopt_below(span.first)
            elif span.first not in self.heads:
                # What it has handled is not known, but it is at least what all have.
                self.heads[span.first] = self._done
                adopted.append(span)
        return adopted

    def _trim(self) -> None:
        self._done = max(self._done, min(self.heads.values(), default=self.last))
        count = nbytes = 0
        while self._sent and self._sent[0].number <= self._done:
            count, nbytes = count + 1, nbytes + self._sent.popleft().nbytes
        if count:
            self.window.leave(count, nbytes)
