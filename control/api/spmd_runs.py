"""`SpmdRuns`: the actor of a job that knows the runs of its SPMD actors: ranks meet there, and learn which failed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from skipper.control.api.actor import Actor, concurrent_endpoint
from skipper.control.model.errors import ControlError, RankFailedError
from skipper.control.runtime import current_runtime as runtime
from skipper.control.runtime.messages import ActorRef
from skipper.control.runtime.ports import watch
from skipper.control.support.gathering import Gatherings

MEET_TIMEOUT_S = 60.0
"""How long the ranks of a run wait for the last of them: ranks that import torch first come seconds apart."""

VERDICT_S = 5.0
"""How long ranks with broken process groups wait to learn the first failure; a death is known earlier."""


@dataclass(frozen=True, slots=True)
class RankLocation:
    """Where a rank runs.

    Attributes:
        network: the same for all that share a loopback device.
        host: how others reach it: an IP if the job has other hosts.
        port: a port that rank 0 holds there for the run; 0 for other ranks.
    """

    network: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class RankFailure:
    """How a rank has failed.

    Attributes:
        rank: the rank.
        summary: class and message of its exception; or how it died.
        remote_traceback: the traceback of its exception; empty if it died.
        is_consequence: whether it seems to follow from the failure of another rank: a process group has broken.
    """

    rank: int
    summary: str
    remote_traceback: str = ""
    is_consequence: bool = False

    def as_error(self, size: int) -> RankFailedError:
        """The error that the other ranks raise."""
        return RankFailedError(self.rank, size, self.summary, self.remote_traceback)


class _SpmdRun:
    """One run: which ranks are still in it, and which have failed.

    Attributes:
        failed: set when a rank has failed.
        decided: set when it is known which was the first.
    """

    def __init__(self, size: int) -> None:
        self.failed = asyncio.Event()
        self.decided = asyncio.Event()
        self._inside = set(range(size))
        self._first: RankFailure | None = None
        self._consequence: RankFailure | None = None

    @property
    def first(self) -> RankFailure | None:
        """The first failure. One that seems to be a consequence counts only as long as no possible cause is known."""
        return self._first or self._consequence

    def left(self, rank: int, failure: RankFailure | None) -> bool:
        """Note the end of a rank; returns whether it was the last."""
        if rank in self._inside:
            self._inside.discard(rank)
            if failure is not None and not failure.is_consequence:
                self._first = self._first or failure
            elif failure is not None:
                self._consequence = self._consequence or failure
            if failure is not None:
                self.failed.set()
            if self._first is not None or not self._inside:
                self.decided.set()
        if not self._inside:
            self.failed.set()  # no rank waits for it any more
        return not self._inside


@dataclass(slots=True)
class _SpmdMesh:
    """The actors of one mesh.

    Attributes:
        size: how many there are.
        watches: the tasks that wait for their ends.
        runs: the runs that have a rank, by their numbers.
        meeting: the number of the last run for which a rank has arrived.
        dead: the first that has ended.
    """

    size: int
    watches: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    runs: dict[int, _SpmdRun] = field(default_factory=dict)
    meeting: int = 0
    dead: RankFailure | None = None


class SpmdRuns(Actor):
    """One actor of the job, in the script's process."""

    def __init__(self) -> None:
        self._gatherings: Gatherings[RankLocation] = Gatherings()
        self._meshes: dict[int, _SpmdMesh] = {}

    @concurrent_endpoint
    async def meet(self, member: ActorRef, run: int, size: int, place: RankLocation) -> list[RankLocation]:
        """Wait until all ranks of a run are here.

        Args:
            member: the actor that arrives.
            run: the number of the run, which all ranks count by themselves.
            size: how many ranks there are.
            place: where it is.

        Returns:
            Their places, in rank order.

        Raises:
            AbsentError: (a `RendezvousError`) some have not arrived.
            RankFailedError: one of them is dead.
        """
        mesh = self._meshes.setdefault(member.uid, _SpmdMesh(size))
        rank = member.rank.rank
        if rank not in mesh.watches:
            mesh.watches[rank] = asyncio.create_task(self._wait_for_end(member, mesh))
        if mesh.dead is not None:
            raise mesh.dead.as_error(size)
        mesh.meeting = run
        mesh.runs.setdefault(run, _SpmdRun(size))
        try:
            places = await self._gatherings.gather(
                (member.uid, run), {rank: place}, expected=range(size), timeout_s=MEET_TIMEOUT_S
            )
        except ControlError:
            mesh.runs.pop(run, None)
            raise
        return list(places.values())

    @concurrent_endpoint
    async def wait_for_failure(self, member: ActorRef, run: int) -> bool:
        """Wait until a rank of a run has failed, or all have left it.

        Returns:
            Whether one has failed.
        """
        known = self._run(member, run)
        if known is None:
            return False
        await known.failed.wait()
        return known.first is not None

    @concurrent_endpoint
    async def leave(self, member: ActorRef, run: int, failure: RankFailure | None) -> RankFailure | None:
        """Note that a rank has left a run.

        Args:
            member: the actor.
            run: the number of the run.
            failure: why it has left; None: the code has ended.

        Returns:
            The first failure of the run, for a rank that has failed itself.
        """
        known = self._run(member, run)
        if known is None:
            return failure
        if known.left(member.rank.rank, failure):
            self._meshes[member.uid].runs.pop(run, None)
        if failure is None:
            return None
        try:
            await asyncio.wait_for(known.decided.wait(), VERDICT_S)
        except TimeoutError:
            known.decided.set()  # so that the others need not wait as long again
        return known.first

    def _run(self, member: ActorRef, run: int) -> _SpmdRun | None:
        mesh = self._meshes.get(member.uid)
        return None if mesh is None else mesh.runs.get(run)

    async def _wait_for_end(self, member: ActorRef, mesh: _SpmdMesh) -> None:
        """Tell the ranks of a mesh of the end of one of them."""
        ended = await watch(runtime.current(), member)
        rank = member.rank.rank
        summary = f"actor {member} has stopped" if ended is None else ended.root_cause().message
        failure = RankFailure(rank, summary)
        mesh.dead = mesh.dead or failure
        for number, run in list(mesh.runs.items()):
            if run.left(rank, failure):
                del mesh.runs[number]
        self._gatherings.fail((member.uid, mesh.meeting), mesh.dead.as_error(mesh.size))
        del mesh.watches[rank]
        if not mesh.watches:
            self._meshes.pop(member.uid, None)
