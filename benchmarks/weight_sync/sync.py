"""Whole models: published by trainers, read by generators into a layout of their own, in place."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from skipper import dataplane
from skipper import torchstore as ts
from skipper.benchmarks.errors import IntegrityError
from skipper.benchmarks.statistics import timed
from skipper.benchmarks.weight_sync.actors import Generator, Pull, Trainer
from skipper.benchmarks.weight_sync.progress import SyncProgress
from skipper.control import ActorMesh
from skipper.torchstore.algebra.manifest import Mode

__all__ = ["Syncs", "measure_syncs", "measure_wake_ups"]

_WARM_UP = 3  # the first sync plans, the second fills the store's second arena, the third finds both warm
_FIRST = 1  # bfloat16 holds whole numbers up to 256 exactly


@dataclass(slots=True)
class Syncs:
    """What a series of syncs measured; lists hold one figure for each.

    Attributes:
        nbytes: What all readers of one sync need together.
        seconds: From the start of the publication until the last reader has all.
        memcpy_s: A copy of as many bytes by one thread, in turns with the syncs.
        pulls: Every read, of every reader.
    """

    nbytes: int
    seconds: list[float] = field(default_factory=list)
    memcpy_s: list[float] = field(default_factory=list)
    pulls: list[Pull] = field(default_factory=list)


async def measure_syncs(
    trainers: ActorMesh[Trainer],
    generators: ActorMesh[Generator],
    *,
    key: str,
    mode: Mode,
    iterations: int,
    memcpy: bool = True,
    device: str = "cpu",
    progress: SyncProgress | None = None,
) -> Syncs:
    """Sync ``iterations`` times, after warming up, with a copy of as many bytes on the ``device`` between two syncs.

    The readers ask for the next version before it exists, as idle generators do. In direct mode the trainer's fence,
    which precedes its optimizer's step, is between two syncs.

    Raises:
        IntegrityError: The readers do not hold what was published last, or the check does not work.
    """
    nbytes = sum(await generators.nbytes.call())
    syncs = Syncs(nbytes)
    copy = _copier(nbytes, device) if memcpy else None
    if progress is not None:
        progress.stage(f"syncs, {mode}", _WARM_UP + iterations)
    for turn in range(_WARM_UP + iterations):
        if mode == "direct" and turn:
            await trainers.fence.call(key)
        await trainers.fill.call(_FIRST + turn % 250)
        copy_s = None if copy is None else timed(copy) / 1e9
        begun, pulls = await _sync(trainers, generators, key, mode, newer_than=turn)
        if progress is not None:
            progress.synced()
        if turn >= _WARM_UP:
            syncs.seconds.append(max(pull.end_s for pull in pulls) - begun)
            syncs.pulls += pulls
            if copy_s is not None:
                syncs.memcpy_s.append(copy_s)
    if progress is not None:
        progress.stage("checking what has arrived")
    await _check(generators, _FIRST + (_WARM_UP + iterations - 1) % 250)
    await ts.delete(key)
    return syncs


async def measure_wake_ups(
    trainers: ActorMesh[Trainer], generators: ActorMesh[Generator], *, key: str, iterations: int
) -> list[float]:
    """Milliseconds from the start of a small publication until a reader that waited for it has it."""
    taken_ms = []
    for turn in range(_WARM_UP + iterations):
        if turn:
            await trainers.fence.call(key)
        begun, pulls = await _sync(trainers, generators, key, "direct", newer_than=turn)
        if turn >= _WARM_UP:
            taken_ms += [(pull.end_s - begun) * 1e3 for pull in pulls]
    await ts.delete(key)
    return taken_ms


async def _sync(
    trainers: ActorMesh[Trainer], generators: ActorMesh[Generator], key: str, mode: Mode, *, newer_than: int
) -> tuple[float, list[Pull]]:
    waiting = generators.pull.call(key, newer_than)
    begun = await trainers.publish.call(key, mode)
    return min(begun), list(await waiting)


def _copier(nbytes: int, device: str) -> Callable[[], object]:
    """A call that copies that many bytes between memory that is warm, and returns when they are copied."""
    if device == "cpu":
        source, target = (np.full(nbytes, value, np.uint8) for value in (1, 0))
        return lambda: dataplane.memcpy(target, source)
    near, far = (torch.full((nbytes,), value, dtype=torch.uint8, device=device) for value in (1, 0))

    def copy() -> None:
        far.copy_(near)
        torch.cuda.synchronize()

    return copy


async def _check(generators: ActorMesh[Generator], expected: int) -> None:
    wrong, negative = await asyncio.gather(generators.wrong.call(expected), generators.wrong.call(expected + 1))
    if any(wrong):
        raise IntegrityError(f"{sum(wrong)} elements at the readers are not those of the last version")
    if not all(negative):
        raise IntegrityError("the check missed that all elements were wrong")
