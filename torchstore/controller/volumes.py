"""The volumes of one store, for its controller: start, free memory, stop."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from skipper.control import ActorMesh, ProcMesh, SupervisionError, this_host, this_proc
from skipper.torchstore.errors import StrategyError
from skipper.torchstore.peers.volume import StorageVolume
from skipper.torchstore.protocol.strategy import ControllerStorageVolumes, TorchStoreStrategy
from skipper.torchstore.support.process import ProcessId


@dataclass(slots=True)
class Volumes:
    """Running volumes.

    Attributes:
        strategy: Which client writes to which volume.
        actors: The actors, by their names from the strategy.
        processes: The process of each.
        homes: The same, for `control`.
        procs: The processes, if they were started for this store.
    """

    strategy: TorchStoreStrategy
    actors: dict[str, ActorMesh[StorageVolume]] = field(default_factory=dict)
    processes: dict[str, ProcessId] = field(default_factory=dict)
    homes: dict[str, ProcMesh] = field(default_factory=dict)
    procs: ProcMesh | None = None

    @staticmethod
    async def start(
        store_name: str,
        number: int,
        strategy: TorchStoreStrategy,
        mesh: ProcMesh | None,
        limit: int | None,
        *,
        apart: bool = False,
    ) -> Volumes:
        """Start one volume in each process of ``mesh``, or in ``number`` new ones, or in this process if not ``apart``.

        Each takes at most ``limit`` bytes, if there is a limit.

        Raises:
            StrategyError: The strategy gives two volumes the same name.
        """
        volumes = Volumes(strategy)
        if mesh is None and isinstance(strategy, ControllerStorageVolumes) and not apart:
            mesh = this_proc()
        elif mesh is None:
            mesh = volumes.procs = this_host().spawn_procs(per_host={"gpus": number})
        try:
            actors = mesh.spawn(f"{store_name}-volumes", StorageVolume, strategy.get_volume_id, limit)
            await volumes._identify(mesh, actors)
        except BaseException:
            await volumes.stop()
            raise
        return volumes

    async def _identify(self, mesh: ProcMesh, spawned: ActorMesh[StorageVolume]) -> None:
        for point, (name, process) in (await spawned.identify.call()).items():
            if name in self.actors:
                raise StrategyError(
                    f"{type(self.strategy).__name__} names two volumes {name!r}: it does not fit a mesh of "
                    f"{spawned.size} volumes"
                )
            one = spawned.size == 1
            self.actors[name] = spawned if one else spawned.slice(**dict(point))
            self.homes[name] = mesh if one else mesh.slice(**dict(point))
            self.processes[name] = process

    def living_in(self, process: ProcessId) -> list[str]:
        """The volumes of a process."""
        return [name for name, where in self.processes.items() if where == process]

    def free(self, volume: str, arenas: tuple[str, ...]) -> None:
        """Drop arenas, or give back the memory of ranges of them."""
        self.actors[volume].free.call(arenas)

    def free_writer(self, writer: ProcessId, keep: tuple[str, ...], clients_below: int) -> None:
        """Drop the arenas of a dead publisher, except those with versions; see `StorageVolume.free_writer`."""
        for actor in self.actors.values():
            actor.free_writer.call(writer, keep, clients_below)

    async def stop(self) -> None:
        """Drop all memory and stop the volumes."""
        for actor in self.actors.values():
            actor.reset.call()
            await _stopped(actor)
        if self.procs is not None:
            await _stopped(self.procs)


async def _stopped(mesh: ActorMesh[Any] | ProcMesh) -> None:
    with suppress(SupervisionError):  # it was already dead
        await mesh.stop()
