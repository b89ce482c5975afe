"""Whole models: published by trainers, read by generators into a layout of their own, in place."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import numpy as np

from skipper import dataplane
from skipper import torchstore as ts
from skipper.benchmarks.errors import IntegrityError
from skipper.benchmarks.weight_sync.actors import Generator, Pull, Trainer
from skipper.control import ActorMesh
from skipper.torchstore.algebra.manifest import Mode

__all__ = ["Memcpy", "Syncs", "measure_syncs", "measure_wake_ups"]

_WARM_UP = 3  # the first plans, the second fills the store's second arena, the third finds both warm
_FIRST = 1  # bfloat16 holds whole numbers up to 256 exactly


class Memcpy:
    """One thread copying as many bytes as a sync moves, between buffers that are warm."""

    def __init__(self, nbytes: int) -> None:
        self._source = np.ones(nbytes, np.uint8)
        self._target = np.zeros(nbytes, np.uint8)

    def seconds(self) -> float:
        """How long one copy takes."""
        begin = time.perf_counter()
        dataplane.memcpy(self._target, self._source)
        return time.perf_counter() - begin


@dataclass(slots=True)
class Syncs:
    """What a series of syncs measured; lists hold one figure for each.

    Attributes:
        nbytes: What all readers of one sync need together.
        seconds: From the start of the publication until the last reader has all.
        memcpy_s: A plain copy of as many bytes, in turns with the syncs.
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
) -> Syncs:
    """Sync ``iterations`` times, after warming up, with a memcpy between two syncs.

    The readers wait for the next version before it is there, as generators do that are out of work. In direct mode
    the trainer's fence, which precedes its optimizer's step, lies between two syncs.

    Raises:
        IntegrityError: The readers do not hold what was published last, or the check cannot tell.
    """
    nbytes = sum(await generators.nbytes.call())
    syncs = Syncs(nbytes)
    copy = Memcpy(nbytes) if memcpy else None
    for turn in range(_WARM_UP + iterations):
        if mode == "direct" and turn:
            await trainers.fence.call(key)
        await trainers.fill.call(_FIRST + turn % 250)
        if copy is not None:
            copy_s = copy.seconds()
        begun, pulls = await _sync(trainers, generators, key, mode, newer_than=turn)
        if turn >= _WARM_UP:
            syncs.seconds.append(max(pull.end_s for pull in pulls) - begun)
            syncs.pulls += pulls
            if copy is not None:
                syncs.memcpy_s.append(copy_s)
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


async def _check(generators: ActorMesh[Generator], expected: int) -> None:
    wrong, negative = await asyncio.gather(generators.wrong.call(expected), generators.wrong.call(expected + 1))
    if any(wrong):
        raise IntegrityError(f"{sum(wrong)} elements at the readers are not those of the last version")
    if not all(negative):
        raise IntegrityError("the check found nothing wrong where everything is")
