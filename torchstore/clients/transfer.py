"""Moving the bytes of a plan: the seals before and after, the proof, and what dataplane's errors mean."""

from __future__ import annotations

import asyncio

from skipper.dataplane.errors import DataplaneError
from skipper.torchstore.algebra.manifest import Binding
from skipper.torchstore.clients.catalog import Opened
from skipper.torchstore.clients.delta_read import DeltaRead
from skipper.torchstore.clients.remote import RemoteStore, explain_transfer
from skipper.torchstore.errors import ChecksumError, SourceChangedError
from skipper.torchstore.support.process import ProcessId
from skipper.torchstore.support.records import Cost
from skipper.torchstore.tensors.plan import Plan, PlanCache, execute
from skipper.torchstore.tensors.quantize import Landing

_TELLING_BYTES = 1 << 20  # a smaller read says more about its messages than about the memory


class Mover:
    """Runs plans for one process.

    Args:
        remote: The store.
        plans: What is dropped when a transfer fails.

    Attributes:
        last_rate: Bytes per second of the last large read; 0 before.
    """

    def __init__(self, remote: RemoteStore, plans: PlanCache) -> None:
        self._remote = remote
        self._plans = plans
        self.last_rate = 0.0

    async def run(
        self,
        key: str,
        opened: Opened,
        plan: Plan,
        cost: Cost,
        timeout: float,
        reduced: DeltaRead | None = None,
    ) -> None:
        """Move the bytes and prove them; where a delta cannot be proved, read everything."""
        if reduced is not None:
            try:
                await self.move(key, opened, plan, reduced, cost, timeout)
                cost.saved_nbytes += plan.nbytes - reduced.nbytes
                return
            except ChecksumError:  # the destination was not what it had been read as
                cost.hit = False
        await self.move(key, opened, plan, plan, cost, timeout)

    async def move(
        self, key: str, opened: Opened, plan: Plan, part: Plan | DeltaRead, cost: Cost, timeout: float
    ) -> None:
        """Move the bytes of a plan or of a part of it; make sure that they were one version's, before and after."""
        try:
            with cost.spent_on("verify"):
                await self._check_seals(key, opened, plan, timeout)
            if plan.transfers:
                with cost.spent_on("transfer"):
                    await execute(part.action, part.nbytes, timeout, fresh=not cost.hit)
                    if plan.proof is not None:
                        await execute(plan.proof.action, plan.proof.nbytes, timeout, fresh=not cost.hit)
            with cost.spent_on("verify"):
                await self._check_seals(key, opened, plan, timeout)
        except DataplaneError as error:
            self._plans.forget(key)
            explain_transfer(error, key, opened.grant.version, self._memory(opened))
        if plan.proof is not None:
            with cost.spent_on("verify"):
                await asyncio.to_thread(plan.proof.check, opened.grant.version)
            cost.nbytes += plan.proof.nbytes
        if part.landings:
            with cost.spent_on("cast"):
                await asyncio.to_thread(_finish, tuple(part.landings.values()))
        cost.nbytes += part.nbytes
        cost.segments += part.segments
        if cost.hit and part.nbytes >= _TELLING_BYTES:
            self.last_rate = part.nbytes / cost.transfer_s

    async def _check_seals(self, key: str, opened: Opened, plan: Plan, timeout: float) -> None:
        for index, generation in (await plan.seals.read(timeout)).items():
            if generation != opened.generations[index]:
                state = f"published generation {generation}" if generation else "is changing it"
                raise SourceChangedError(
                    key,
                    opened.grant.version,
                    f"{opened.writers[index]} {state}, granted was generation {opened.generations[index]}",
                )

    def _memory(self, opened: Opened) -> list[tuple[Binding, ProcessId]]:
        """Each source's memory, with the process that it lives and dies with."""
        volumes = self._remote.info.processes
        return [
            (source.binding, writer if source.binding.mode == "direct" else volumes[source.binding.volume])
            for source, writer in zip(opened.sources, opened.writers, strict=True)
            if source.binding is not None
        ]


def _finish(landings: tuple[Landing, ...]) -> None:
    for landing in landings:
        landing.finish()
