"""Moving the bytes of a plan and verifying them; from another copy if a volume is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from functools import partial
from typing import TypeVar

from skipper.dataplane.errors import DataplaneError, TransferError
from skipper.torchstore.algebra.copies import choose
from skipper.torchstore.algebra.manifest import Binding
from skipper.torchstore.clients.catalog import Choose, Opened
from skipper.torchstore.clients.delta_read import DeltaRead
from skipper.torchstore.clients.remote import RemoteStore, explain_transfer
from skipper.torchstore.errors import ChecksumError, SourceChangedError, StoreTimeoutError, VolumeLostError
from skipper.torchstore.support.process import ProcessId, this_process
from skipper.torchstore.support.records import Cost
from skipper.torchstore.tensors.landing import Landing
from skipper.torchstore.tensors.plan import Plan, PlanCache, execute

T = TypeVar("T")

_PATIENCE = 0.5  # of the time that is left, for the first copies; then others are tried
_ANSWER_S = 5.0  # this read considers a volume lost that does not answer within that time
_TELLING_BYTES = 1 << 20  # a smaller read says more about its messages than about the memory


class Mover:
    """Runs plans for one process.

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
        """Move the bytes and verify them; if a delta cannot be verified, read everything."""
        if reduced is not None:
            try:
                await self.move(key, opened, plan, reduced, cost, timeout)
                cost.saved_nbytes += plan.nbytes - reduced.nbytes
                return
            except ChecksumError:  # the destination had been changed since it was read
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
                    await execute(part.action, part.nbytes, timeout, fresh=not cost.hit, description=f"get {key}")
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
        """Each source's memory, with the process that holds it."""
        volumes = self._remote.info.processes
        return [
            (source.binding, writer if source.binding.mode == "direct" else volumes[source.binding.volume])
            for source, writer in zip(opened.sources, opened.writers, strict=True)
            if source.binding is not None
        ]


def _finish(landings: tuple[Landing, ...]) -> None:
    for landing in landings:
        landing.finish()


class Failover:
    """Chooses copies for the readers of one process. When a volume is lost, a read continues with another copy."""

    def __init__(self, remote: RemoteStore) -> None:
        self._remote = remote
        self._near = {name for name, process in remote.info.processes.items() if process.is_local}

    def choose(self, lost: Collection[str] = ()) -> Choose:
        """Chooses a copy that is near and not known to be lost."""
        gone = {*self._remote.lost, *lost}
        return partial(choose, near=self._near, lost=gone, reader=this_process().pid)

    async def read(
        self, parts: Iterable[Collection[str]], end: float, read: Callable[[Choose, float], Awaitable[T]]
    ) -> T:
        """Read from one copy of each part; if a volume turns out to be lost, again from others.

        ``parts`` has for each part the volumes that hold a copy; ``end`` is by `time.perf_counter`. ``read`` is called
        with the choice of copies and the time until which it may take.

        Raises:
            VolumeLostError: No copy is left of some part.
            StoreTimeoutError: It took too long.
        """
        held, lost = [set(volumes) for volumes in parts], set[str]()
        all_answer = False
        while True:
            left = [volumes - self._remote.lost - lost for volumes in held]
            has_spare = not all_answer and any(len(volumes) > 1 for volumes in left)
            now = time.perf_counter()
            try:
                return await read(self.choose(lost), now + (end - now) * _PATIENCE if has_spare else end)
            except (VolumeLostError, StoreTimeoutError, TransferError) as error:
                if not has_spare:
                    raise
                asked = set[str]().union(*left)
                patience = min(_ANSWER_S, max(end - time.perf_counter(), 0.0) * _PATIENCE)
                silent = await self._remote.find_silent(asked, patience)
                if not silent and not isinstance(error, StoreTimeoutError):
                    raise
                all_answer = not silent  # the read is only slow: it has the rest of the time
                lost |= silent
