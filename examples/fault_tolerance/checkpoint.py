"""`Checkpoint`: a copy of what was learned that outlives all groups, in the memory of the coordinator's process."""

from __future__ import annotations

from torch import Tensor

from examples.fault_tolerance.replica import Replica
from examples.fault_tolerance.task import Task
from skipper.dataplane import RDMABuffer
from skipper.dataplane.errors import DataplaneError


class Checkpoint:
    """The state after some step, or 0 where none was copied yet.

    There are two copies by turns, so that the last one is whole while the next one is read.
    """

    def __init__(self, task: Task) -> None:
        self.step = 0
        self._copies = [Replica(task), Replica(task)]

    @property
    def handle(self) -> RDMABuffer:
        """Where others read it."""
        return self._copies[0].state_handle

    async def take(self, step: int, state: RDMABuffer, *, timeout_s: float) -> None:
        """Copy the state after a step from the memory of one that has made it, unless that one dies meanwhile."""
        spare: Tensor = self._copies[1].state
        try:
            await state.read_into(spare, timeout=timeout_s)
        except DataplaneError:
            return
        self._copies.reverse()
        self.step = step
