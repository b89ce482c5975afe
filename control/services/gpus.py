"""Which GPUs of their hosts the replicas of services have."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from skipper.control.api.actor import Actor, endpoint
from skipper.control.api.mesh import HostMesh, get_or_spawn_controller

LEDGER = "skipper_gpus"
"""Name of the job's one `GpuLedger`; for an attached host its address follows."""

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(devices: Path = Path("/dev")) -> list[str]:
    """The GPUs that this process may use, as CUDA names them: those that the environment names, else all."""
    named = os.environ.get(VISIBLE)
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    count = sum(re.fullmatch(r"nvidia\d+", device.name) is not None for device in devices.iterdir())
    return [str(index) for index in range(count)]


class _Looker(Actor):
    """Looks up the GPUs of a host."""

    @endpoint
    def visible(self) -> list[str]:
        """The GPUs that processes of this host may use."""
        return visible_gpus()


class GpuLedger(Actor):
    """Gives each replica GPUs of its own, over all services of the job; for one host, which has these ``gpus``."""

    def __init__(self, gpus: list[str]) -> None:
        self._free = gpus
        self._count = len(gpus)

    @endpoint
    def take(self, count: int) -> list[str]:
        """Take ``count`` GPUs.

        Raises:
            LookupError: fewer are free.
        """
        if count > len(self._free):
            raise LookupError(
                f"a replica needs {count} GPUs, one for each of its processes; {len(self._free)} of the "
                f"{self._count} of this host are free"
            )
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    @endpoint
    def give_back(self, gpus: list[str]) -> None:
        """Take GPUs back whose processes have ended."""
        self._free += gpus


async def take(host: HostMesh, count: int) -> list[str]:
    """Take ``count`` GPUs of a host, which nobody else in the job has.

    Raises:
        ActorError: fewer are free.
        SupervisionError: the host is lost.
    """
    ledger = await _ledger(host)
    taken: list[str] = await ledger.take.call_one(count)
    return taken


async def give_back(host: HostMesh, gpus: list[str]) -> None:
    """Give GPUs of a host back whose processes have ended."""
    ledger = await get_or_spawn_controller(_name(host), GpuLedger, [])
    await ledger.give_back.call_one(gpus)


def _name(host: HostMesh) -> str:
    return " ".join((LEDGER, *host.names))


async def _ledger(host: HostMesh) -> Any:
    if not host.names:
        return await get_or_spawn_controller(LEDGER, GpuLedger, visible_gpus())
    procs = host.spawn_procs(name="gpus")
    try:
        found = await procs.spawn("gpus", _Looker).visible.call_one()
    finally:
        await procs.stop()
    return await get_or_spawn_controller(_name(host), GpuLedger, found)
