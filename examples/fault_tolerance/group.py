"""`Group`: one replica group, as the coordinator has it, through all its lives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from examples.fault_tolerance.task import Task
from examples.fault_tolerance.worker import Handles, Worker
from skipper.control import ActorMesh, HostMesh, ProcMesh, SupervisionError
from skipper.control.cluster.recovery import Recoverable, RecoveryPolicy

ENVIRONMENT = {"OMP_NUM_THREADS": "1"}

START_S = 60.0
"""How long a life may take until it answers. The first one waits for imports, later ones need a tenth of a second."""


@dataclass(slots=True, eq=False)
class Member:
    """One life of a group that is up.

    Attributes:
        group: whose.
        life: its number.
        actors: its processes' workers.
        handles: what others may read of each.
        is_current: whether it has the state of the last step, and so a share of the next one.
        has_entered: whether it has taken part in a step.
    """

    group: Group
    life: int
    actors: ActorMesh[Worker]
    handles: Sequence[Handles]
    is_current: bool = False
    has_entered: bool = False


class Group:
    """A mesh of processes that dies, and is made anew, as one.

    Args:
        number: its place among the groups.
        task: what to learn.
        procs: how many processes.
        hosts: where they are.
        policy: what to do when it fails.
        deadline_s: for reads of its workers.
        on_change: called when it has come up, or was lost.
        on_end: called where the policy allows no further life.
    """

    def __init__(
        self,
        number: int,
        task: Task,
        *,
        procs: int,
        hosts: HostMesh,
        policy: RecoveryPolicy,
        deadline_s: float,
        on_change: Callable[[], None],
        on_end: Callable[[str], None],
    ) -> None:
        self.number = number
        self.member: Member | None = None
        self._task, self._procs, self._deadline_s = task, procs, deadline_s
        self._on_change, self._on_end = on_change, on_end
        self._coming: asyncio.Task[None] | None = None
        self.lives = Recoverable(f"group-{number}", self._make, policy, hosts=hosts, on_made=self._has_been_made)

    def lose(self, member: Member, error: SupervisionError | str) -> None:
        """Give up a life: it has died, or is of no use."""
        if self.member is not member:
            return  # that is known
        if isinstance(error, SupervisionError) and error.failure is not None:
            goes_on = self.lives.supervise(error.failure)
        else:
            goes_on = self.lives.condemn(str(error))
        self.forget()
        if not goes_on:
            self._on_end(f"group {self.number} fails again and again: {error}")

    def forget(self) -> None:
        """Note that the life that was up is over."""
        self.member = None
        self._on_change()

    def _make(self, hosts: HostMesh, name: str) -> tuple[ProcMesh, ActorMesh[Worker]]:
        procs = hosts.spawn_procs({"ranks": self._procs}, env=ENVIRONMENT, name=name)
        return procs, procs.spawn(name, Worker, self._task, self._deadline_s)

    def _has_been_made(self, lives: Recoverable[Worker]) -> None:
        assert lives.actors is not None  # it has just been made
        self._coming = asyncio.get_running_loop().create_task(self._come_up(lives.life, lives.actors))

    async def _come_up(self, life: int, actors: ActorMesh[Worker]) -> None:
        try:
            async with asyncio.timeout(START_S):
                handles = list(await actors.handles.call())
        except SupervisionError:
            return  # a failure of its mesh, of which its owner is told
        except TimeoutError:
            if self.lives.life == life and not self.lives.condemn(f"no sign of life {START_S:g} s after its start"):
                self._on_end(f"group {self.number} does not come up")
            return
        if self.lives.life == life and self.lives.actors is actors:
            self.member = Member(self, life, actors, handles)
            self._on_change()
