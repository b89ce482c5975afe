"""What is learned: a small network imitates another one. Which samples a step has is decided by its number alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

DTYPE = torch.float64
"""So that all that can differ between two runs, the order of sums, is some 1e-16 of them."""


@dataclass(frozen=True, slots=True)
class Task:
    """The task, the same in every process.

    Attributes:
        seed: of the teacher, the student's first weights and all batches.
        batch: samples of one step, over all replica groups.
        inputs: numbers of a sample.
        hidden: width of both networks.
        learning_rate: of Adam.
    """

    seed: int = 0
    batch: int = 96
    inputs: int = 16
    hidden: int = 48
    learning_rate: float = 2e-3

    def student(self) -> nn.Module:
        """The network that learns, with its first weights."""
        return self._network(self.seed)

    def teacher(self) -> nn.Module:
        """The network that knows."""
        return self._network(self.seed + 1).requires_grad_(False)

    def inputs_of(self, step: int) -> Tensor:
        """The samples of a step, one in each row; by whomever and how often they are asked for."""
        generator = torch.Generator().manual_seed((self.seed << 32) + step)
        return torch.randn(self.batch, self.inputs, generator=generator, dtype=DTYPE)

    def shares(self, parts: int) -> list[tuple[int, int]]:
        """The batch cut for so many processes: the first sample of each, and the one behind its last."""
        return [(self.batch * part // parts, self.batch * (part + 1) // parts) for part in range(parts)]

    def _network(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layers = (nn.Linear(self.inputs, self.hidden), nn.Tanh(), nn.Linear(self.hidden, 1))
            return nn.Sequential(*layers).to(DTYPE)
