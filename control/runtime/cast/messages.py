"""What travels in trees beside the payloads: fixed layouts and JSON, so that a relay unpickles nothing."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from skipper.control.model.errors import ProtocolError
from skipper.control.runtime.cast.order import Move
from skipper.control.runtime.cast.tree import RankSpan
from skipper.control.wire.addresses import host_of
from skipper.control.wire.bulk import Incoming, Outgoing
from skipper.control.wire.envelope import Kind, Payload, ProcessRef

_CAST = struct.Struct("<QQQI")
"""The numbers of route, cast, and last settled cast; how many moves follow."""
_MOVE = struct.Struct("<IIQ")
"""See `order.Move`."""
_NUMBER = struct.Struct("<Q")
_ENTRY = struct.Struct("<IBI")
"""Of a reply: rank, kind, number of segments."""

Segment: TypeAlias = bytes | bytearray | memoryview
Node = tuple[int, ProcessRef]
"""A rank in the mesh, or slice, that is cast to, and its process."""
Start = tuple[int, bool]
"""For a node: how much was numbered for it beside the casts of the route, and whether it is to wait for the ``begin``
that comes straight, behind what has no number."""


@dataclass(frozen=True, slots=True)
class CastHeader:
    """What stands before the payload of a cast.

    Attributes:
        route: the number of the route.
        number: of the cast on this route; they count from 1 without a gap.
        settled: up to which cast no reply is waited for any more.
        moves: what was numbered between the last cast of the route and this one.
    """

    route: int
    number: int
    settled: int
    moves: Sequence[Move] = ()

    def encode(self, span: RankSpan) -> bytes:
        """The header for a subtree."""
        moves = [move for move in self.moves if move[0] < span.end and span.first < move[1]]
        head = _CAST.pack(self.route, self.number, self.settled, len(moves))
        return b"".join((head, *(_MOVE.pack(*move) for move in moves)))

    @staticmethod
    def decode(segment: Segment | Outgoing | Incoming) -> CastHeader:
        """The inverse of `encode`.

        Raises:
            ProtocolError: this is no such header.
        """
        data = plain(segment)
        try:
            route, number, settled, count = _CAST.unpack_from(data)
            if len(data) != _CAST.size + count * _MOVE.size:
                raise ProtocolError("the header of a cast has the wrong size")
            moves = tuple(_MOVE.iter_unpack(data[_CAST.size :])) if count else ()
        except struct.error as error:
            raise ProtocolError(f"not the header of a cast: {error}") from error
        return CastHeader(route, number, settled, moves)


@dataclass(frozen=True, slots=True)
class Answer:
    """The reply of one rank on its way up."""

    rank: int
    kind: Kind
    payload: Payload


def pack_answers(number: int, answers: Sequence[Answer]) -> Payload:
    """Replies to one cast as the payload of one message; their segments are passed on as they are."""
    parts = [_NUMBER.pack(number)]
    segments: list[Any] = []
    for answer in answers:
        parts.append(_ENTRY.pack(answer.rank, answer.kind, len(answer.payload)))
        segments += answer.payload
    return (b"".join(parts), *segments)


def unpack_answers(payload: Payload) -> tuple[int, list[Answer]]:
    """The inverse of `pack_answers`.

    Raises:
        ProtocolError: this is no such payload.
    """
    if not payload:
        raise ProtocolError("a bundle of replies without a header")
    header, segments = plain(payload[0]), payload[1:]
    answers = []
    try:
        (number,) = _NUMBER.unpack_from(header)
        begin = 0
        for rank, kind, count in _ENTRY.iter_unpack(header[_NUMBER.size :]):
            answers.append(Answer(rank, Kind(kind), segments[begin : begin + count]))
            begin += count
    except (struct.error, ValueError) as error:
        raise ProtocolError(f"not a bundle of replies: {error}") from error
    if begin != len(segments):
        raise ProtocolError("a bundle of replies of the wrong size")
    return number, answers


@dataclass(frozen=True, slots=True)
class Opening:
    """What a node is told of its route before the first cast comes along.

    Attributes:
        route: the number of the route.
        origin: the process that casts.
        fanout: of the tree.
        span: the node and those below it.
        since: the number of the last cast that the subtree need not see any more.
        nodes: the members of the span, in the order of their positions.
        starts: likewise, where their numbers begin. A node that is told for the first time gets every cast.
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

    def encode(self) -> bytes:
        """As JSON; every process stands there once, and its launcher before it."""
        rows: dict[str, tuple[int, list[object]]] = {}
        origin = _row(self.origin, rows)
        places = [
            [rank, _row(process, rows), before, int(waits)]
            for (rank, process), (before, waits) in zip(self.nodes, self.starts, strict=True)
        ]
        fixed = [self.route, origin, self.fanout, self.span.first, self.span.end, self.since]
        return json.dumps([fixed, [row for _, row in rows.values()], places], separators=(",", ":")).encode()

    @staticmethod
    def decode(segment: Segment | Outgoing | Incoming) -> Opening:
        """The inverse of `encode`.

        Raises:
            ProtocolError: this is no opening.
        """
        try:
            fixed, rows, places = json.loads(bytes(plain(segment)))
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
    """The positions at which another host begins than that of the node before.

    For a part of the nodes, whose first one has the position ``first``, they are those of all that lie within it: so
    everybody in a tree cuts it in the same way.
    """
    hosts = [host_of(process.address) for _, process in nodes]
    return [first + at for at, host in enumerate(hosts) if at == 0 or host != hosts[at - 1]]


def _row(process: ProcessRef, rows: dict[str, tuple[int, list[object]]]) -> int:
    """The place of a process among the rows, where it is put if it was not there."""
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


def plain(segment: Segment | Outgoing | Incoming) -> Segment:
    """A segment that is no loan.

    Raises:
        ProtocolError: it is one.
    """
    if isinstance(segment, Outgoing | Incoming):
        raise ProtocolError("a header that is lent")
    return segment
