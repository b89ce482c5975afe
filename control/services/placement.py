"""Which host a replica of a service starts on."""

from __future__ import annotations

from collections.abc import Iterable

from skipper.control.api.mesh import HostMesh, this_host


def pick(number: int, lives: list[bool], load: list[int]) -> int:
    """The index of a host: the replica's own, in turn by its number, or while that is lost one with the least to do.

    Args:
        number: of the replica.
        lives: for each host, whether it is not known to be lost.
        load: for each host, how many replicas it has.
    """
    count = len(lives)
    own = number % count
    alive = [(own + step) % count for step in range(count) if lives[(own + step) % count]]
    # Where all are lost its own does as well: the start fails, and counts as any that has failed.
    return own if not alive or lives[own] else min(alive, key=load.__getitem__)


class Placement:
    """The hosts of a service, and how many of its replicas are on each.

    Args:
        hosts: attached hosts; None for the host of this process alone.
    """

    def __init__(self, hosts: HostMesh | None) -> None:
        self._hosts = hosts

    def choose(self, number: int, others: Iterable[int]) -> tuple[int, HostMesh]:
        """The host that a replica starts on: its index, and itself as it was attached last.

        Args:
            number: of the replica.
            others: the indices of the hosts that the other replicas are on.
        """
        if self._hosts is None or not self._hosts.names:
            return 0, this_host()
        hosts = self._hosts.latest()
        lives = hosts.alive()
        load = [0] * len(lives)
        for index in others:
            load[index] += 1
        index = pick(number, lives, load)
        return index, hosts.slice(hosts=index)
