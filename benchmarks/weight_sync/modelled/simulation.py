"""A discrete-event simulation of bytes on their way through cards, buses and switches.

A flow is what one reader reads from one publisher. It is cut into chunks, of which some are in flight at a time. A
chunk passes the resources of its path one after another. Each resource serves one chunk at a time, in the order in
which they come; a chunk begins to leave a resource when its head does, as in a switch that cuts through. There is no
randomness.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

__all__ = ["ReadFlow", "SimulatedRun", "Resource", "Simulation", "bound_s"]

_Event = tuple[float, int, int, int, int, float]
"""When, a number that makes events different, flow, chunk, position in the path, when the chunk's tail comes."""


@dataclass(frozen=True, slots=True)
class Resource:
    """What serves one chunk at a time.

    Attributes:
        name: Unique.
        kind: What it is, for people: resources of a kind are alike.
        bytes_per_s: Rate of a chunk in flight.
        s_per_op: Seconds for each operation of the chunk, in addition.
        holds: Whether a chunk continues only when all of it has been served, as when a processor prepares it.
    """

    name: str
    kind: str
    bytes_per_s: float
    s_per_op: float = 0.0
    holds: bool = False

    def service_s(self, nbytes: int, ops: int) -> float:
        """Seconds that it is busy with that many bytes and operations."""
        return nbytes / self.bytes_per_s + ops * self.s_per_op


@dataclass(frozen=True, slots=True)
class ReadFlow:
    """Bytes for one reader from one publisher.

    Attributes:
        ops: Contiguous stretches.
        path: The resources that they pass, by index.
    """

    reader: int
    nbytes: int
    ops: int
    path: tuple[int, ...]


@dataclass(slots=True)
class SimulatedRun:
    """The result of a simulation.

    Attributes:
        end_s: When the last chunk came.
        reader_end_s: When each reader had all, by reader.
        served_s: Busy seconds of each resource.
        served_nbytes: Bytes that passed each resource.
        received_nbytes: Bytes that came, by reader.
    """

    end_s: float
    reader_end_s: dict[int, float]
    served_s: list[float]
    served_nbytes: list[int]
    received_nbytes: dict[int, int]


@dataclass(slots=True)
class _Running:
    flow: ReadFlow
    chunks: int
    issued: int = 0
    arrived: int = 0

    def part(self, chunk: int) -> tuple[int, int]:
        """Bytes and operations of one chunk: of all chunks together those of the flow."""
        return _share(self.flow.nbytes, self.chunks, chunk), _share(self.flow.ops, self.chunks, chunk)


@dataclass
class Simulation:
    """Flows over resources.

    Args:
        resources: All of them; paths name them by index.
        chunk_nbytes: Bytes of one chunk, at most.
        window: Chunks of one flow that are in flight.
        on_reader_end: Called with a reader and the time when all flows that were begun for it are over; may begin more.
    """

    resources: Sequence[Resource]
    chunk_nbytes: int = 4 << 20
    window: int = 2
    on_reader_end: Callable[[int, float], None] | None = None
    _events: list[_Event] = field(default_factory=list, init=False)
    _running: list[_Running] = field(default_factory=list, init=False)
    _open: dict[int, int] = field(default_factory=dict, init=False)
    _number: int = field(default=0, init=False)

    def begin(self, flow: ReadFlow, at_s: float = 0.0) -> None:
        """A flow begins then.

        Raises:
            ValueError: It has no bytes, or no path.
        """
        if flow.nbytes < 1 or not flow.path:
            raise ValueError(f"a flow has bytes and a path: {flow}")
        self._running.append(_Running(flow, -(-flow.nbytes // self.chunk_nbytes)))
        self._open[flow.reader] = self._open.get(flow.reader, 0) + 1
        for _ in range(self.window):
            self._issue(len(self._running) - 1, at_s)

    def run(self) -> SimulatedRun:
        """Run until nothing is in flight."""
        count = len(self.resources)
        free, served, passed = [0.0] * count, [0.0] * count, [0] * count
        ends: dict[int, float] = {}
        received: dict[int, int] = {}
        now = 0.0
        while self._events:
            now, _, number, chunk, position, tail = heapq.heappop(self._events)
            running = self._running[number]
            flow, (nbytes, ops) = running.flow, running.part(chunk)
            if position == len(flow.path):
                received[flow.reader] = received.get(flow.reader, 0) + nbytes
                ends[flow.reader] = now
                self._arrive(number, now)
                continue
            at = flow.path[position]
            resource = self.resources[at]
            service = resource.service_s(nbytes, ops)
            start = max(now, free[at])
            free[at] = start + service
            served[at] += service
            passed[at] += nbytes
            tail = max(tail, start + service)
            is_over = resource.holds or position + 1 == len(flow.path)
            self._push(tail if is_over else start, number, chunk, position + 1, tail)
        return SimulatedRun(now, ends, served, passed, received)

    def _arrive(self, number: int, now: float) -> None:
        running = self._running[number]
        running.arrived += 1
        self._issue(number, now)
        if running.arrived < running.chunks:
            return
        reader = running.flow.reader
        self._open[reader] -= 1
        if not self._open[reader] and self.on_reader_end is not None:
            self.on_reader_end(reader, now)

    def _issue(self, number: int, at_s: float) -> None:
        running = self._running[number]
        if running.issued < running.chunks:
            self._push(at_s, number, running.issued, 0, at_s)
            running.issued += 1

    def _push(self, at_s: float, number: int, chunk: int, position: int, tail: float) -> None:
        self._number += 1
        heapq.heappush(self._events, (at_s, self._number, number, chunk, position, tail))


def bound_s(resources: Sequence[Resource], flows: Sequence[ReadFlow]) -> tuple[float, Resource]:
    """What no order of the chunks can beat: the work of the busiest resource, and which one that is."""
    work = [0.0] * len(resources)
    for flow in flows:
        for at in flow.path:
            work[at] += resources[at].service_s(flow.nbytes, flow.ops)
    busiest = max(range(len(resources)), key=work.__getitem__)
    return work[busiest], resources[busiest]


def _share(total: int, parts: int, number: int) -> int:
    return total * (number + 1) // parts - total * number // parts
