"""Which GPUs of this host the replicas of services have."""

from __future__ import annotations

import os
import re
from pathlib import Path

from control.actor import Actor
from control.marking import endpoint

LEDGER = "skipper_gpus"
"""Name of the job's one `GpuLedger`."""

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(devices: Path = Path("/dev")) -> list[str]:
    """The GPUs that this process may use, as CUDA names them: those that the environment names, else all there are."""
    named = os.environ.get(VISIBLE)
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    count = sum(re.fullmatch(r"nvidia\d+", device.name) is not None for device in devices.iterdir())
    return [str(index) for index in range(count)]


class GpuLedger(Actor):
    """Gives each replica GPUs of its own, over all services of the job.

    Args:
        gpus: those that there are.
    """

    def __init__(self, gpus: list[str]) -> None:
        self._free = gpus
        self._count = len(gpus)

    @endpoint
    def take(self, count: int) -> list[str]:
        """So many GPUs.

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
