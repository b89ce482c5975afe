"""`RankRegistry`: the actor in rank 0's process that knows which ranks have joined, and tells them the job's end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from skipper.control.api.actor import Actor, concurrent_endpoint
from skipper.control.model.shape import Extent
from skipper.control.wire.process_ref import ProcessRef

REGISTRY = "skipper-spmd-ranks"
"""The name by which all ranks find the registry."""


@dataclass(frozen=True, slots=True)
class RankEntry:
    """One rank that has joined.

    Attributes:
        process: its process.
        local_world_size: how many ranks its node has.
    """

    process: ProcessRef
    local_world_size: int


def extent_of(local_world_sizes: Sequence[int]) -> Extent:
    """The axes of ranks: ``hosts`` and ``gpus``, or only ``ranks`` if nodes have different numbers of them."""
    (local, *others), world = sorted(set(local_world_sizes)), len(local_world_sizes)
    return Extent(("ranks",), (world,)) if others else Extent(("hosts", "gpus"), (world // local, local))


class RankRegistry(Actor):
    """The ranks that have joined the job of rank 0; rank 0 itself is not among them."""

    def __init__(self, world_size: int) -> None:
        self._missing = set(range(1, world_size))
        self._here: dict[int, RankEntry] = {}
        self._complete = asyncio.Event()
        self._over = asyncio.Event()
        self._is_well = False

    @concurrent_endpoint
    async def stay(self, rank: int, entry: RankEntry) -> bool:
        """Register a rank, and wait until the job is over.

        Returns:
            Whether the job has ended well.
        """
        self._here[rank] = entry
        self._missing.discard(rank)
        if not self._missing:
            self._complete.set()
        await self._over.wait()
        return self._is_well

    @concurrent_endpoint
    async def wait_for_all(self, timeout: float) -> dict[int, RankEntry]:
        """The ranks that have joined, without rank 0; some are missing if they did not come in time."""
        try:
            async with asyncio.timeout(timeout):
                while self._missing:
                    await self._complete.wait()
        except TimeoutError:
            pass
        return self._here

    @concurrent_endpoint
    async def dismiss(self, is_well: bool) -> None:
        """Let all ranks leave. The first call decides whether the job has ended well."""
        if not self._over.is_set():
            self._is_well = is_well
            self._over.set()
