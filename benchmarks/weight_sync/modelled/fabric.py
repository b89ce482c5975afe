"""Hosts, cards and switches between publishers and readers, as resources of a simulation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from skipper.benchmarks.weight_sync.modelled.simulation import ReadFlow, Resource

__all__ = ["Fabric", "Hardware"]


@dataclass(frozen=True, slots=True)
class Hardware:
    """Stated hardware: none of this is measured here.

    Attributes:
        name: For people.
        nic_bytes_per_s: Rate of the network card that each GPU has, in each direction.
        bus_bytes_per_s: Between a GPU and its card.
        leaf_cards: Cards at one leaf switch. Publishers and readers are at different leaves.
        oversubscription: Cards' bandwidth of a leaf over that of its links to the spine, which itself never blocks.
        post_s: Time of a reader's processor for each contiguous stretch that it asks its card for.
        efficiency: Share of these rates that payload gets in the simulation; the bound has all of them.
    """

    name: str = "H100, one 400 Gb/s card for each GPU"
    nic_bytes_per_s: float = 50e9
    bus_bytes_per_s: float = 55e9
    leaf_cards: int = 64
    oversubscription: float = 1.0
    post_s: float = 0.15e-6
    efficiency: float = 0.85


class Fabric:
    """The resources of a job on some hardware.

    Args:
        hardware: Which.
        publishers: How many ranks publish.
        readers: How many read.
        share: Share of the hardware's rates that payload gets.

    Attributes:
        resources: All of them; paths name them by index.
    """

    def __init__(self, hardware: Hardware, publishers: int, readers: int, share: float = 1.0) -> None:
        self.resources: list[Resource] = []
        self._leaf_cards = hardware.leaf_cards
        nic, bus = hardware.nic_bytes_per_s * share, hardware.bus_bytes_per_s * share
        uplink = nic * hardware.leaf_cards / hardware.oversubscription
        ranks = publishers + readers
        leaves = -(-publishers // self._leaf_cards) + -(-readers // self._leaf_cards)
        self._publishers = publishers
        self._post = self._add("reader's processor", (f"of reader {n}" for n in range(readers)), 1e18, hardware.post_s)
        self._bus = self._add("bus between GPU and card", (f"of rank {n}" for n in range(ranks)), bus)
        self._out = self._add("card, outgoing", (f"of rank {n}" for n in range(ranks)), nic)
        self._in = self._add("card, incoming", (f"of rank {n}" for n in range(ranks)), nic)
        self._up = self._add("leaf to spine", (f"of leaf {n}" for n in range(leaves)), uplink)
        self._down = self._add("spine to leaf", (f"of leaf {n}" for n in range(leaves)), uplink)

    def flow(self, publisher: int, reader: int, nbytes: int, ops: int) -> ReadFlow:
        """What a reader reads from a publisher."""
        return self._flow(publisher, reader, nbytes, ops)

    def flow_between(self, owner: int, reader: int, nbytes: int, ops: int) -> ReadFlow:
        """What a reader reads from another reader's copy."""
        return self._flow(self._publishers + owner, reader, nbytes, ops)

    def _flow(self, source: int, reader: int, nbytes: int, ops: int) -> ReadFlow:
        target = self._publishers + reader
        path = [self._post + reader, self._bus + source, self._out + source]
        near, far = self._leaf(source), self._leaf(target)
        if near != far:
            path += [self._up + near, self._down + far]
        return ReadFlow(reader, nbytes, ops, (*path, self._in + target, self._bus + target))

    def _leaf(self, rank: int) -> int:
        if rank < self._publishers:
            return rank // self._leaf_cards
        return -(-self._publishers // self._leaf_cards) + (rank - self._publishers) // self._leaf_cards

    def _add(self, kind: str, whose: Iterable[str], bytes_per_s: float, s_per_op: float = 0.0) -> int:
        first = len(self.resources)
        holds = s_per_op > 0
        self.resources += [Resource(f"{kind} {name}", kind, bytes_per_s, s_per_op, holds) for name in whose]
        return first
