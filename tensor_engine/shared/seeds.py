"""The seed with which a worker begins."""

from __future__ import annotations

import torch

_DEFAULT = 67280421310721
"""Torch's own (`default_rng_seed_val` in c10/core/GeneratorImpl.h)."""


def seed_worker(rank: int) -> None:
    """Have a worker draw other numbers than the first one, unless the user's code has seeded its generators."""
    if rank and torch.initial_seed() == _DEFAULT:
        torch.manual_seed(_DEFAULT + rank)
