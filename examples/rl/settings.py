"""What one run of the RL example is made of."""

from __future__ import annotations

from dataclasses import dataclass

from examples.rl.model import ModelConfig
from examples.rl.task import VOCABULARY

WEIGHTS = "policy"
"""The key under which the trainers publish the weights."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything the actors need to know; the same for all of them. ``device`` is "cpu" or "cuda"."""

    seed: int
    digits: int = 8
    prompts: int = 16
    group: int = 8
    learning_rate: float = 1.5e-3
    timeout_s: float = 60.0
    device: str = "cpu"

    @property
    def model(self) -> ModelConfig:
        """The policy's sizes. The last answer token is never an input."""
        return ModelConfig(vocabulary=VOCABULARY, positions=2 * self.digits)
