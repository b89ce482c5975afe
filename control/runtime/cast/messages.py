"""The payloads of the messages of trees: JSON, so that a relay unpickles nothing, and payloads that others packed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from skipper.control.model.errors import ProtocolError
from skipper.control.runtime.cast.tree import RankSpan
from skipper.control.wire.addresses import host_of
from skipper.control.wire.bulk import Incoming, Outgoing
from skipper.control.wire.messages import CastAnswers, Kind, Payload, RouteOpened
from skipper.control.wire.process_ref import ProcessRef

Segment: TypeAlias = bytes | bytearray | memoryview
Node = tuple[int, ProcessRef]
"""A rank in the mesh, or slice, that receives the casts, and its process."""
Start = tuple[int, bool]
"""For a node: how many messages were numbered for it besides the casts of the route, and whether it must wait for the
``begin``, which comes directly, behind the messages without a number."""


@dataclass(frozen=True, slots=True)
class GivenAnswer:
    """The answer of one rank on its way up."""

    rank: int
    kind: Kind
    payload: Payload


def pack_answers(route: int, number: int, port: int, given: Sequence[GivenAnswer], *, is_home: bool) -> CastAnswers:
    """Answers to one cast as one message; their segments are passed on unchanged."""
    entries = tuple((answer.rank, answer.kind, len(answer.payload)) for answer in given)
    payload = tuple(segment for answer in given for segment in answer.payload)
    return CastAnswers(route, number, port, is_home, entries, payload=payload)


def unpack_answers(answers: CastAnswers) -> list[GivenAnswer]:
    """The inverse of `pack_answers`.

    Raises:
        ProtocolError: it does not say whose its segments are.
    """
    given, begin = [], 0
    for rank, kind, count in answers.entries:
        if kind not in (Kind.REPLY, Kind.FAILURE):
            raise ProtocolError(f"an answer to a cast of kind {kind}")
        given.append(GivenAnswer(rank, Kind(kind), answers.payload[begin : begin + count]))
        begin += count
    if begin != len(answers.payload):
        raise ProtocolError("answers to a cast of the wrong size")
    return given


@dataclass(frozen=True, slots=True)
class Opening:
    """What a node learns of its route before the first cast comes.

    Attributes:
        route: the number of the route.
        origin: the process that casts.
        fanout: of the tree.
        span: the node and those below it.
        since: the number of the last cast that the subtree no longer needs.
        nodes: the members of the span, in the order of their positions.
        starts: in the same order, where their numbers begin. A node that gets its first opening gets every cast.
    """

    route: int
    origin: ProcessRef
    fanout: int
    span: RankSpan
    since: int
    nodes: Sequence[Node]
    starts: Sequence[Start]

    def part(self, span: RankSpan) -> Opening:
        """The same for a subtree."""
        part = slice(span.first - self.span.first, span.end - self.span.first)
        return Opening(self.route, self.origin, self.fanout, span, self.since, self.nodes[part], self.starts[part])

    def message(self) -> RouteOpened:
        """The message for it, in JSON; it contains each process once, and its launcher before it."""
        rows: dict[str, tuple[int, list[object]]] = {}
        origin = _row(self.origin, rows)
        places = [
            [rank, _row(process, rows), before, int(waits)]
            for (rank, process), (before, waits) in zip(self.nodes, self.starts, strict=True)
        ]
        fixed = [self.route, origin, self.fanout, self.span.first, self.span.end, self.since]
        content = json.dumps([fixed, [row for _, row in rows.values()], places], separators=(",", ":"))
        return RouteOpened(payload=(content.encode(),))

    @staticmethod
    def of(message: RouteOpened) -> Opening:
        """The inverse of `message`.

        Raises:
            ProtocolError: this is no opening.
        """
        try:
            fixed, rows, places = json.loads(b"".join(map(_plain, message.payload)))
            route, origin, fanout, first, end, since = map(int, fixed)
            processes = _processes(rows)
            nodes = [(int(rank), processes[place]) for rank, place, _, _ in places]
            starts = [(int(before), bool(waits)) for _, _, before, waits in places]
            if len(nodes) != end - first or end <= first or fanout < 2:
                raise ValueError("its numbers do not fit together")
            return Opening(route, processes[origin], fanout, RankSpan(first, end), since, nodes, starts)
        except (ValueError, TypeError, IndexError, OverflowError, RecursionError) as error:
            raise ProtocolError(f"not the opening of a route: {error}") from error


def host_starts(nodes: Sequence[Node], first: int = 0) -> list[int]:
    """The positions at which a host begins: the node before is on another one.

    For a part of the nodes, whose first one has the position ``first``, they are the positions for all nodes that lie
    within the part. So every node cuts the tree in the same way.
    """
    hosts = [host_of(process.address) for _, process in nodes]
    return [first + at for at, host in enumerate(hosts) if at == 0 or host != hosts[at - 1]]


def _row(process: ProcessRef, rows: dict[str, tuple[int, list[object]]]) -> int:
    """The index of a process among the rows; it is added if it is missing."""
    known = rows.get(process.id)
    if known is not None:
        return known[0]
    launcher = -1 if process.launcher is None else _row(process.launcher, rows)
    place = len(rows)
    rows[process.id] = place, [process.id, process.address, process.name, launcher]
    return place


def _processes(rows: Iterable[tuple[str, str, str, int]]) -> list[ProcessRef]:
    processes: list[ProcessRef] = []
    for process_id, address, name, launcher in rows:
        known = None if launcher < 0 else processes[launcher]
        processes.append(ProcessRef(str(process_id), str(address), str(name), known))
    return processes


def _plain(segment: Segment | Outgoing | Incoming) -> Segment:
    """A segment that is not lent.

    Raises:
        ProtocolError: it is lent.
    """
    if isinstance(segment, Outgoing | Incoming):
        raise ProtocolError("a header that is lent")
    return segment
