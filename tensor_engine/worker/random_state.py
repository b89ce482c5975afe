"""The random numbers of a worker: its seed, and the states of its generators."""

from __future__ import annotations

import torch

from skipper.control import context

_DEFAULT_SEED = 67280421310721
"""Torch's default seed (`default_rng_seed_val` in c10/core/GeneratorImpl.h)."""

GPU_NBYTES = 17
"""Size of a GPU's part of `get_states`: whether it is in use, and its generator's seed and offset."""


def seed_worker(rank: int) -> None:
    """Make a worker draw other numbers than the first one, unless user code has seeded its generators."""
    if rank and torch.initial_seed() == _DEFAULT_SEED:
        torch.manual_seed(_DEFAULT_SEED + rank)


def seed_generator(seed: int | torch.Tensor, places: dict[int, int] | None) -> None:
    """Seed the worker's generators with a number plus its place, by its rank in the root mesh; None adds nothing."""
    offset = 0 if places is None else places[int(context().actor_instance.rank.rank)]
    torch.manual_seed(int(seed) + offset)


def use_deterministic_algorithms() -> None:
    """Make torch refuse operations that have no deterministic algorithm."""
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def get_state(device: str) -> torch.Tensor:
    """The state of a generator."""
    return torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()


def set_state(state: torch.Tensor, device: str) -> None:
    """Put a generator into a state."""
    if device == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state)


def get_states() -> torch.Tensor:
    """The concatenated states of the CPU's and of the GPU's generator."""
    gpu = torch.zeros(GPU_NBYTES, dtype=torch.uint8)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        gpu[0] = 1
        gpu[1:] = torch.cuda.get_rng_state()
    return torch.cat((torch.get_rng_state(), gpu))


def set_states(states: torch.Tensor) -> None:
    """Put the generators into the states of `get_states`; or only the CPU's generator, into its own state."""
    nbytes = torch.get_rng_state().numel()
    torch.set_rng_state(states[:nbytes].clone())
    gpu = states[nbytes:]
    if len(gpu) and gpu[0]:
        torch.cuda.set_rng_state(gpu[1:].clone())


def new_state(seed: int | torch.Tensor, device: str) -> torch.Tensor:
    """The state of a generator that has just been seeded."""
    return torch.Generator(device).manual_seed(int(seed)).get_state()
