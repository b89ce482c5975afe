"""An owner that leaves the failures of what it owns to `Recoverable`."""

import asyncio

from skipper.control import Actor, ActorMesh, HostMesh, MeshFailure, ProcMesh, SupervisionError, endpoint
from skipper.control.cluster.recovery import Recoverable, RecoveryPolicy
from tests.control.actors import BadConstruction, Echo


class Owner(Actor):
    """Owns a mesh of two processes."""

    def __init__(self, policy: RecoveryPolicy, hosts: HostMesh | None = None, is_bad: bool = False) -> None:
        self.is_bad = is_bad
        self.made: list[int] = []
        self.failures: list[str] = []
        self.crew: Recoverable[Echo] = Recoverable(
            "crew", self.make, policy, hosts=hosts, on_made=lambda crew: self.made.append(crew.life)
        )

    def make(self, hosts: HostMesh, name: str) -> tuple[ProcMesh, ActorMesh[Echo]]:
        procs = hosts.spawn_procs({"gpus": 2}, name=name)
        return procs, procs.spawn(name, BadConstruction if self.is_bad else Echo)

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.failures.append(failure.mesh_name)
        assert self.crew.owns(failure)
        return self.crew.supervise(failure)

    @endpoint
    async def pids(self, after: int = 0) -> list[int]:
        """Of the first life after so many that answers."""
        while True:
            if self.crew.actors is not None and self.crew.life >= after:
                try:
                    return list(await self.crew.actors.pid.call())
                except SupervisionError:
                    pass
            await asyncio.sleep(0.01)

    @endpoint
    async def actors(self) -> ActorMesh[Echo] | None:
        return self.crew.actors

    @endpoint
    async def condemn(self) -> bool:
        return self.crew.condemn("it is of no use")

    @endpoint
    async def history(self) -> tuple[list[int], list[str]]:
        return self.made, self.failures

    @endpoint
    async def end(self) -> None:
        await self.crew.end()
        await self.crew.end()
