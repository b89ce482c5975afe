"""Readers that feed readers, in a simulation: the store's own scheduler decides which copy each reads, and when."""

from __future__ import annotations

from collections.abc import Sequence

from skipper.benchmarks.weight_sync.modelled.fabric import Fabric
from skipper.benchmarks.weight_sync.modelled.reads import ReaderPlan
from skipper.benchmarks.weight_sync.modelled.simulation import Simulation
from skipper.torchstore.controller.peer_read_scheduler import PeerReadScheduler
from skipper.torchstore.protocol.messages import Share
from skipper.torchstore.support.process import ProcessId

__all__ = ["FanOut"]


class FanOut:
    """Reads of a version; a reader that has it offers it to others.

    Args:
        simulation: The simulation in which they run; its ``on_reader_end`` is set.
        fabric: The fabric whose resources it has.
        plans: Plans of all readers.
        groups: How many read groups there are: readers whose numbers are equal modulo it read the same.
    """

    def __init__(self, simulation: Simulation, fabric: Fabric, plans: Sequence[ReaderPlan], groups: int) -> None:
        self._simulation, self._fabric, self._plans, self._groups = simulation, fabric, plans, groups
        self._scheduler = PeerReadScheduler()
        self._waiting: dict[int, list[int]] = {}
        simulation.on_reader_end = self._end

    def begin(self) -> None:
        """All readers ask at once."""
        for reader in range(len(self._plans)):
            self._ask(reader, 0.0)

    def _ask(self, reader: int, at_s: float) -> None:
        group, process = str(reader % self._groups), _process(reader)
        if self._scheduler.must_wait(group, process):
            self._waiting.setdefault(reader % self._groups, []).append(reader)
            return
        offer = self._scheduler.choose(group, process)
        self._scheduler.begin(group, reader, process, offer)
        plan = self._plans[reader]
        if offer is None:
            for publisher, moved in plan.moved.items():
                self._simulation.begin(self._fabric.flow(publisher, reader, moved.nbytes, moved.runs), at_s)
        else:  # of one layout: one stretch for each tensor
            owner = offer.share.writer.pid - 1
            self._simulation.begin(self._fabric.flow_between(owner, reader, plan.nbytes, plan.tensors), at_s)

    def _end(self, reader: int, at_s: float) -> None:
        process = _process(reader)
        self._scheduler.finish(reader, Share("", "", 0, process), failed=False)
        self._scheduler.end(reader)
        for other in self._waiting.pop(reader % self._groups, []):
            self._ask(other, at_s)


def _process(reader: int) -> ProcessId:
    return ProcessId("engines", reader + 1, 1)
