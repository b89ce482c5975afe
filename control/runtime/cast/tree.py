"""`Tree`: how a cast to many goes down: each receiver passes it on to a few. Arithmetic on positions, nothing else.

The receivers form a row. A node has the first position of a span. The rest of the span is cut into as many parts as the
fan-out says, as evenly as possible; each part is a node again. So a subtree is a run of neighbours, a message to a
subtree is a slice of the message to all, and the depth is the least that the fan-out allows, or one more.

If the receivers are on several hosts, a span with more than one host is cut only between hosts; the rest of the node's
own host counts as one. So a cast enters each host once, however many there are.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class RankSpan:
    """A node and those below it.

    Attributes:
        first: the position of the node itself.
        end: the position behind the last of those below it.
    """

    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first

    def below(self, fanout: int, starts: Sequence[int] = ()) -> list[RankSpan]:
        """The nodes that this one passes on to; for ``starts`` see `cut`."""
        first = self.first + 1
        behind = starts[bisect_left(starts, first) : bisect_left(starts, self.end)]
        if len(behind) == 1 and behind[0] == first:
            return [RankSpan(first, self.end)]  # all are on one other host, which the cast enters once
        return cut(first, self.end, fanout, starts)


def spans(first: int, end: int, fanout: int) -> list[RankSpan]:
    """Positions cut into at most ``fanout`` parts, whose sizes differ by one at most.

    Raises:
        ValueError: ``fanout`` is below 2.
    """
    if fanout < 2:
        raise ValueError(f"a tree needs a fan-out of 2 or more, not {fanout}")
    count = end - first
    parts = min(fanout, count)
    cuts = [first + count * part // parts for part in range(parts + 1)] if parts > 0 else []
    return [RankSpan(begin, until) for begin, until in pairwise(cuts)]


def cut(first: int, end: int, fanout: int, starts: Sequence[int]) -> list[RankSpan]:
    """Positions cut into at most ``fanout`` parts: between hosts, or evenly where all are on one.

    Args:
        first: the first position.
        end: the one behind the last.
        fanout: 2 or more.
        starts: where hosts begin, in order; values beyond the positions do not matter.
    """
    edges = [first, *starts[bisect_right(starts, first) : bisect_left(starts, end)], end]
    if len(edges) == 2:
        return spans(first, end, fanout)
    return [RankSpan(edges[part.first], edges[part.end]) for part in spans(0, len(edges) - 1, fanout)]


class Tree:
    """The tree below a caster; the caster has no position in it.

    Args:
        size: the number of receivers.
        fanout: to how many each passes on at most, the caster included; 2 or more.
        starts: the first position on each host, if the receivers are ordered by host: a cast then goes to each host
            once, and is passed on there.

    Attributes:
        heads: the nodes that the caster itself sends to.
        span_at: the span of each position.
        parent_of: the position that passes on to each position; None for the heads.
        depth: how many links a cast crosses on its longest way.
    """

    def __init__(self, size: int, fanout: int, starts: Sequence[int] = ()) -> None:
        self.fanout = fanout
        self.heads = cut(0, size, fanout, starts)
        self.span_at: list[RankSpan] = [RankSpan(position, position + 1) for position in range(size)]
        self.parent_of: list[int | None] = [None] * size
        self.depth = 0
        self._starts = starts
        level = self.heads
        while level:
            self.depth += 1
            level = [child for span in level for child in self._place(span)]

    def below(self, position: int) -> list[RankSpan]:
        """The nodes that the one at a position passes on to."""
        return self.span_at[position].below(self.fanout, self._starts)

    def _place(self, span: RankSpan) -> list[RankSpan]:
        self.span_at[span.first] = span
        below = self.below(span.first)
        for child in below:
            self.parent_of[child.first] = span.first
        return below
