"""Which rank of an SPMD job writes to which volume: on any number of hosts, and without variables of a launcher."""

from __future__ import annotations

import os
import socket
import zlib

from skipper.control import current_rank
from skipper.control.runtime.join_file import this_network
from skipper.torchstore.protocol.strategy import HostStrategy, LocalRankStrategy
from skipper.torchstore.spmd.ranks import place_of


class HostVolumes(HostStrategy):
    """One volume for each host. Two hosts of one name, and HOSTNAME of the one from which srun was started, differ."""

    @classmethod
    def get_volume_id(cls) -> str:
        """The host's name, and what tells it from others of that name."""
        return f"{socket.gethostname()}-{zlib.crc32(this_network().encode()):08x}"

    @classmethod
    def get_client_id(cls) -> str:
        """The same: every process of the host writes to its volume."""
        return cls.get_volume_id()


class RankVolumes(LocalRankStrategy):
    """One volume for each rank, named by its number among all ranks."""

    def __init__(self, store_name: str) -> None:
        self._store_name = store_name

    @classmethod
    def get_volume_id(cls) -> str:
        """The rank of the volume among the volumes."""
        return str(current_rank().rank)

    def choose(self, volumes: tuple[str, ...]) -> str:
        """That of this rank; for a process that a rank has started, that of the rank, if it has inherited its RANK.

        Raises:
            StrategyError: This process is no rank, nor has it anything from one.
        """
        place = place_of(self._store_name)
        if place is not None:
            return str(place.rank)
        inherited = os.environ.get("RANK")
        return inherited if inherited in volumes else super().choose(volumes)
