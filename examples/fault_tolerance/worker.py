"""The actor that trains: one process of a replica group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from examples.fault_tolerance.replica import Replica
from examples.fault_tolerance.task import Task
from skipper.control import Actor, current_rank, endpoint
from skipper.dataplane import RDMAAction, RDMABuffer


@dataclass(frozen=True, slots=True)
class Handles:
    """What others may read of a process."""

    state: RDMABuffer
    gradient: RDMABuffer


class Worker(Actor):
    """Makes a step in three calls: `differentiate`, `reduce`, `apply`.

    The first two can be repeated, with another quorum; only `apply` changes what was learned.

    Args:
        task: what to learn.
        timeout_s: how long a read of another process' memory may take.
    """

    def __init__(self, task: Task, timeout_s: float) -> None:
        torch.set_num_threads(1)
        self._replica = Replica(task)
        self._timeout_s = timeout_s
        self._step = 0
        self._total = torch.zeros_like(self._replica.gradient)
        self._is_reduced = False

    @endpoint
    def handles(self) -> Handles:
        """Where others read."""
        return Handles(self._replica.state_handle, self._replica.gradient_handle)

    @endpoint
    def differentiate(self, step: int, shares: Sequence[tuple[int, int]]) -> None:
        """Compute the gradient of this process' share of a step's batch, for the others to read."""
        self._require(step - 1)
        self._is_reduced = False
        self._replica.differentiate(step, *shares[current_rank().rank])

    @endpoint
    def adopt(self, step: int, states: Sequence[RDMABuffer]) -> None:
        """Take over the state of one that has made so many steps, by reading its memory."""
        donor = states[current_rank().rank % len(states)]
        donor.read_into(self._replica.state, timeout=self._timeout_s).get()
        self._replica.resume(step)
        self._step = step
        self._is_reduced = False

    @endpoint
    def reduce(self, step: int, gradients: Sequence[RDMABuffer]) -> None:
        """Read the gradients of all shares, and sum them: in the order given, so that all get the same bits."""
        self._require(step - 1)
        rows = torch.empty(len(gradients), *self._total.shape, dtype=self._total.dtype)
        reads = RDMAAction()
        for row, gradient in zip(rows, gradients, strict=True):
            reads.read_remote(row, gradient)
        reads.submit(timeout=self._timeout_s).get()
        self._total.zero_()
        for row in rows:
            self._total += row
        self._is_reduced = True

    @endpoint
    def apply(self, step: int) -> float:
        """Make the step, which everybody of the quorum has reduced; its loss."""
        self._require(step - 1)
        if not self._is_reduced:
            raise RuntimeError(f"step {step} is to be applied before it was reduced")
        self._is_reduced = False
        loss = self._replica.apply(self._total)
        self._step = step
        return loss

    @endpoint
    def replay(self, steps: int) -> list[float]:
        """Make so many steps alone, each with the whole batch; their losses."""
        losses = []
        for step in range(self._step + 1, self._step + steps + 1):
            self._replica.differentiate(step, 0, self._replica.task.batch)
            self._total.copy_(self._replica.gradient)
            losses.append(self._replica.apply(self._total))
        self._step += steps
        return losses

    @endpoint
    def learned(self) -> tuple[int, Tensor]:
        """How many steps were made, and weights and moments after them."""
        return self._step, self._replica.state.clone()

    def _require(self, step: int) -> None:
        if self._step != step:
            raise RuntimeError(f"this process has made {self._step} steps, and not {step}")
