"""Two actors play a tensor back and forth: each writes it into the other's memory, one-sidedly.

Only the word that there is something to look at travels as a message. Every element is compared after every stroke, and
the time of a write stands beside that of a memcpy of its size, measured in turns with it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from skipper.control import Actor, ActorMesh, endpoint, this_host
from skipper.dataplane import RDMABuffer, empty, memcpy

SIZES = (4 << 10, 1 << 20, 16 << 20)


@dataclass
class Rally:
    """What one player has measured, in seconds a piece."""

    backend: str
    writes: list[float] = field(default_factory=list)
    memcpys: list[float] = field(default_factory=list)
    round_trips: list[float] = field(default_factory=list)


def timed(move: Callable[[], object]) -> float:
    """Seconds of the second of two moves; the first finds little in the caches."""
    move()
    begin = time.perf_counter()
    move()
    return time.perf_counter() - begin


class Player(Actor):
    """Owns a tensor that the other one writes to, and one from which it writes."""

    @endpoint
    def take_place(self, nbytes: int, shared: bool) -> RDMABuffer:
        """Lay out the memory for tensors of that size; the handle is what the other one needs to write there."""
        new = empty if shared else torch.empty
        self.inbox, self.ball, self.spare = (new((nbytes // 4,), dtype=torch.float32).zero_() for _ in range(3))
        self.buffer = RDMABuffer(self.inbox)
        return self.buffer

    @endpoint
    def serve(self, other: ActorMesh[Any], theirs: RDMABuffer, rounds: int) -> Rally:
        """Play: odd numbers go over, even ones come back."""
        rally = Rally(theirs.backend)
        for number in range(1, 2 * rounds, 2):
            self.ball.fill_(number)
            rally.memcpys.append(timed(lambda: memcpy(self.spare, self.ball)))
            rally.writes.append(timed(lambda: theirs.write_from(self.ball, timeout=10).get()))
            begin = time.perf_counter()
            other.hit.call_one(number, self.buffer).get(timeout=20)
            rally.round_trips.append(rally.writes[-1] + time.perf_counter() - begin)
            self.expect(number + 1)
        return rally

    @endpoint
    def hit(self, number: int, theirs: RDMABuffer) -> None:
        """Look at what has come, and write one more back."""
        self.expect(number)
        torch.add(self.inbox, 1, out=self.ball)
        theirs.write_from(self.ball, timeout=10).get()

    def expect(self, number: float) -> None:
        """Raise unless every element is that number."""
        if not bool((self.inbox == number).all()):
            low, high = self.inbox.min().item(), self.inbox.max().item()
            raise ValueError(f"expected {number} in every element, found {low} to {high}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Play with tensors of several sizes and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=50, help="strokes of each player, for each size")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="NBYTES", help="of the tensors")
    parser.add_argument("--plain", action="store_true", help="memory from torch itself, which others cannot map: UCX")
    options = parser.parse_args(arguments)
    if min(options.rounds, *options.sizes) < 1 or any(nbytes % 4 for nbytes in options.sizes):
        parser.error("rounds and sizes are positive, and sizes multiples of 4")

    players = this_host().spawn_procs({"sides": 2}, env={"OMP_NUM_THREADS": "1"}).spawn("players", Player)
    ping, pong = players.slice(sides=0), players.slice(sides=1)
    print(f"{'bytes':>10} {'over':>5} {'write us':>9} {'GB/s':>6} {'memcpy us':>9} {'ratio':>6} {'round trip us':>13}")
    for nbytes in options.sizes:
        _, theirs = players.take_place.call(nbytes, not options.plain).get(timeout=60)
        rally = ping.serve.call_one(pong, theirs, options.rounds).get(timeout=100)
        write, copy, trip = (
            1e6 * statistics.median(times) for times in (rally.writes, rally.memcpys, rally.round_trips)
        )
        print(
            f"{nbytes:>10} {rally.backend:>5} {write:>9.1f} {nbytes / write / 1e3:>6.2f} {copy:>9.1f}"
            f" {copy / write:>6.2f} {trip:>13.1f}"
        )
    print(f"{2 * options.rounds} strokes of each size, every element as expected after each")
    return 0


if __name__ == "__main__":
    sys.exit(main())
