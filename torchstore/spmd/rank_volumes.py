"""Which rank of an SPMD job writes to which volume: on any number of hosts, without a launcher's variables."""

from __future__ import annotations

import os
import socket
import zlib

from skipper.control import current_rank
from skipper.control.runtime.join_file import this_network
from skipper.torchstore.protocol.strategy import HostStrategy, LocalRankStrategy
from skipper.torchstore.spmd.ranks import place_of


class HostVolumes(HostStrategy):
    """One volume per host, even if two hosts have the same name, or srun has passed on HOSTNAME of its own host."""

    @classmethod
    def get_volume_id(cls) -> str:
        """The host's name, and an id that distinguishes it from others with that name."""
        return f"{socket.gethostname()}-{zlib.crc32(this_network().encode()):08x}"

    @classmethod
    def get_client_id(cls) -> str:
        """The same: every process of the host writes to its volume."""
        return cls.get_volume_id()


class RankVolumes(LocalRankStrategy):
    """One volume per rank, named by its number among all ranks."""

    def __init__(self, store_name: str) -> None:
        self._store_name = store_name

    @classmethod
    def get_volume_id(cls) -> str:
        """The rank of the volume among the volumes."""
        return str(current_rank().rank)

    def choose(self, volumes: tuple[str, ...]) -> str:
        """The volume of this rank; a process that a rank has started uses the rank's volume, if it has inherited RANK.

        Raises:
            StrategyError: This process is not a rank, and has not inherited RANK from one.
        """
        place = place_of(self._store_name)
        if place is not None:
            return str(place.rank)
        inherited = os.environ.get("RANK")
        return inherited if inherited in volumes else super().choose(volumes)
