"""Random numbers: each worker draws from torch's default generator of its process, and each differs from the others.

A worker's generator begins with torch's default seed plus its rank, so that runs of a script repeat. All streams of a
worker, and actors in its process, share it: where they draw at the same time, each may get any of the numbers.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

from skipper.control import ProcMesh
from skipper.tensor_engine.script.activation import get_active_mesh, no_mesh
from skipper.tensor_engine.script.remote import remote
from skipper.tensor_engine.script.tensor import Tensor
from skipper.tensor_engine.worker import random_state

__all__ = ["get_state", "make_deterministic", "manual_seed", "new_state", "set_state"]


def manual_seed(seed: int | torch.Tensor, *, same: bool = False, mesh: ProcMesh | None = None) -> None:
    """Seed the generators of the workers, as `torch.manual_seed` does for those of one process.

    Args:
        seed: a number, or an integer tensor of the mesh with the seed of each worker.
        same: give all workers the same seed; else a number is increased by the rank, from the first worker of the mesh.
        mesh: the mesh of the workers; None: the active mesh.

    Raises:
        NoActiveMeshError: no mesh is given or active.
    """
    places = None if isinstance(seed, Tensor) or same else _places(mesh)
    with _on(mesh):
        _seed_generator(seed, places)


def make_deterministic(seed: int = 0, *, same: bool = False, mesh: ProcMesh | None = None) -> None:
    """Make the workers draw the same random numbers, and compute the same results, in each run.

    Seeds their generators as `manual_seed` does, and makes torch use only deterministic algorithms there: an operation
    that has none fails.

    Args:
        seed: for `manual_seed`.
        same: for `manual_seed`.
        mesh: for `manual_seed`.
    """
    manual_seed(seed, same=same, mesh=mesh)
    with _on(mesh):
        _use_deterministic_algorithms()


def get_state(device: str = "cpu", *, mesh: ProcMesh | None = None) -> torch.Tensor:
    """The states of the generators, as a tensor of bytes on the CPU of each worker.

    Args:
        device: whose generator: ``"cpu"`` or ``"cuda"``.
        mesh: whose workers; None for those of the active mesh.
    """
    with _on(mesh):
        result: torch.Tensor = _get_state(device)
        return result


def set_state(state: torch.Tensor, device: str = "cpu") -> None:
    """Put generators into a state: what `get_state` or `new_state` has returned."""
    _set_state(state, device)


def new_state(seed: int | torch.Tensor, device: str = "cpu", *, mesh: ProcMesh | None = None) -> torch.Tensor:
    """The state that a generator has when it has just been seeded, for `set_state`.

    Args:
        seed: a number, or an integer tensor of the mesh with each worker's own.
        device: of the generator.
        mesh: whose workers; None for those of the active mesh.
    """
    with _on(mesh):
        result: torch.Tensor = _new_state(seed, device)
        return result


def get_states(*, mesh: ProcMesh | None = None) -> torch.Tensor:
    """The states of all generators of each worker, in one tensor, for `set_states` alone.

    Args:
        mesh: whose workers; None for those of the active mesh.
    """
    with _on(mesh):
        result: torch.Tensor = _get_states()
        return result


def set_states(states: torch.Tensor) -> None:
    """Put all generators into the states that `get_states` has returned; or those of CPUs into one of `get_state`."""
    _set_states(states)


def _places(mesh: ProcMesh | None) -> dict[int, int]:
    ranks = (mesh or get_active_mesh()).ranks
    return {rank: place for place, rank in enumerate(ranks)}


def _on(mesh: ProcMesh | None) -> Any:
    return contextlib.nullcontext() if mesh is None else mesh.activate()


@functools.cache
def _state_nbytes(device: str) -> int:
    with no_mesh():
        # The state of a CUDA generator is a seed and an offset. The script may have no such device.
        return torch.get_rng_state().numel() if device == "cpu" else 16


def _like_state(*args: Any) -> torch.Tensor:
    return torch.empty(_state_nbytes(args[-1]), dtype=torch.uint8)


def _like_states() -> torch.Tensor:
    return torch.empty(_state_nbytes("cpu") + random_state.GPU_NBYTES, dtype=torch.uint8)


_seed_generator = remote(random_state.seed_generator)
_use_deterministic_algorithms = remote(random_state.use_deterministic_algorithms)
_get_state = remote(random_state.get_state, propagate=_like_state)
_set_state = remote(random_state.set_state)
_get_states = remote(random_state.get_states, propagate=_like_states)
_set_states = remote(random_state.set_states)
_new_state = remote(random_state.new_state, propagate=_like_state)
