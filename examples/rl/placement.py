"""Who runs on which hosts; and hosts that are lost and come back."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from skipper.control import HostError, HostMesh

RETRY_S = 2.0
"""How long a host that is lost is knocked at, and how long it is then left alone."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The hosts of a run; those that train may be the same as those that generate.

    Attributes:
        everywhere: all of them.
        trainers: along the axis ``hosts``, or this host.
        generators: the same.
    """

    everywhere: HostMesh
    trainers: HostMesh
    generators: HostMesh

    @staticmethod
    def over(hosts: HostMesh, trainers: int) -> Placement:
        """Up to half of the hosts train, as many as have the same share of the trainers; the others generate."""
        count = len(hosts.names)
        if count < 2:
            return Placement(hosts, hosts, hosts)
        training = max(part for part in range(1, count // 2 + 1) if trainers % part == 0)
        return Placement(hosts, hosts.slice(hosts=slice(0, training)), hosts.slice(hosts=slice(training, count)))

    def lost(self) -> list[int]:
        """Which of the generators' hosts are lost, by index."""
        return [index for index, lives in enumerate(self.generators.latest().alive()) if not lives]

    async def reattach(self) -> None:
        """Wait until all hosts are there again."""
        while True:
            try:
                await asyncio.to_thread(self.everywhere.reattach, timeout=RETRY_S)
            except HostError:
                await asyncio.sleep(RETRY_S)
            else:
                return
