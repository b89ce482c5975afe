"""The task: write the digits of the prompt in reverse order. Any program can check an answer (see `judge`)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

EQUALS = 10
VOCABULARY = 12
"""Ten digits, the equals sign, and one token without a use, so that 2 and 4 generators cut it evenly."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """What goes from the generators through the judges to the trainers: answers that one version has sampled.

    ``prompts`` (n, digits + 1) and ``answers`` (n, digits) are int64 tokens; ``log_probabilities``
    (n, digits) are the sampling policy's own; ``rewards`` (n, digits) are 1.0 where the token is right, and 0.0
    before they are judged.
    Rows ``k * group`` to ``(k + 1) * group`` answer the same prompt.
    """

    version: int
    group: int
    prompts: Tensor
    answers: Tensor
    log_probabilities: Tensor
    rewards: Tensor

    @property
    def reward(self) -> float:
        """Mean reward: the share of digits that are right (0.1 by chance among digits)."""
        return float(self.rewards.mean())

    @property
    def solved(self) -> float:
        """Share of answers that are right in every digit."""
        return float((self.rewards.amin(dim=1) == 1).float().mean())

    def judged(self, rewards: list[list[float]]) -> Rollout:
        """The same with the rewards that it has earned."""
        return dataclasses.replace(self, rewards=torch.tensor(rewards))

    def to(self, device: str | torch.device) -> Rollout:
        """The same with its tensors there."""
        return dataclasses.replace(
            self,
            prompts=self.prompts.to(device),
            answers=self.answers.to(device),
            log_probabilities=self.log_probabilities.to(device),
            rewards=self.rewards.to(device),
        )

    def part(self, index: int, parts: int) -> Rollout:
        """The ``index``-th of ``parts`` nearly equal pieces; a prompt's answers stay together."""
        groups = len(self.prompts) // self.group
        rows = slice(groups * index // parts * self.group, groups * (index + 1) // parts * self.group)
        return Rollout(
            self.version,
            self.group,
            self.prompts[rows],
            self.answers[rows],
            self.log_probabilities[rows],
            self.rewards[rows],
        )


def make_prompts(count: int, digits: int, generator: torch.Generator) -> Tensor:
    """``count`` random prompts, int64 (count, digits + 1): the digits and the equals sign."""
    numbers = torch.randint(0, 10, (count, digits), generator=generator)
    return torch.cat((numbers, torch.full((count, 1), EQUALS)), dim=1)
