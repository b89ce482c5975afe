"""The proof that the bytes arrive, and that a wrong byte would have been noticed.

Before the timed rounds, for each direction of a size: the source gets a pattern and the sink another one, and after one
transfer both sides must hold that of the source. Then, as a negative control, one byte of the source is flipped: after
another transfer the check of the sink must report that byte and no other. The timed rounds move a third pattern. After
them the sink is overwritten (the yardsticks wrote there too), and one more transfer, by the same calls that were timed,
must bring that pattern back. Nothing of this is timed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from skipper.benchmarks.bandwidth.messages import Mismatch, Where, Workload
from skipper.benchmarks.bandwidth.side import End
from skipper.benchmarks.errors import IntegrityError
from skipper.benchmarks.sizes import format_size

__all__ = ["SEEDS", "Direction", "directions", "prove_after", "prove_before"]

SEEDS = 3
"""Patterns that the proof of one size uses: one to move, one to overwrite, and one for the timed rounds."""


@dataclass(frozen=True, slots=True)
class Direction:
    """One direction of bytes: from ``source`` to ``sink``, moved by ``mover``."""

    name: str
    source: End
    source_where: Where
    sink: End
    sink_where: Where
    mover: End

    def fill_source(self, size: int, *, seed: int) -> None:
        """Put a pattern where the bytes come from."""
        self.source.fill(self.source_where, size, seed=seed)

    def require(self, size: int, *, seed: int, when: str) -> None:
        """Check both sides against the pattern.

        Raises:
            IntegrityError: A byte differs.
        """
        for side, where, role in (
            (self.sink, self.sink_where, "destination"),
            (self.source, self.source_where, "source"),
        ):
            mismatch = side.verify(where, size, seed=seed)
            if mismatch is not None:
                raise IntegrityError(f"{self.name} of {format_size(size)}: {when}, {_describe(mismatch)} of the {role}")


def directions(workload: Workload, near: End, far: End) -> list[Direction]:
    """Every direction in which ``workload`` moves bytes, the client's own first."""
    movers = [("near", near, far)]
    if workload.bidirectional:
        movers.append(("far", far, near))
    found = []
    for whose, mover, owner in movers:
        name = f"{'the server' if whose == 'far' else 'the client'}'s {workload.op}"
        if workload.op == "read":
            found.append(Direction(name, owner, "exposed", mover, "local", mover))
        else:
            found.append(Direction(name, mover, "local", owner, "exposed", mover))
    return found


def prove_before(ways: Sequence[Direction], size: int, *, batch: int, seed: int) -> None:
    """Prove each direction and its negative control; leaves a pattern at the sources for `prove_after`.

    Args:
        ways: The directions.
        size: Bytes of each buffer.
        batch: Buffers of one transfer.
        seed: Seed of the first of the `SEEDS` patterns used.

    Raises:
        IntegrityError: Wrong bytes, or bytes made wrong on purpose that the check did not notice.
    """
    for way in ways:
        way.fill_source(size, seed=seed)
        way.sink.fill(way.sink_where, size, seed=seed + 1)
        way.mover.transfer(size, runs=1)
        way.require(size, seed=seed, when="after the first transfer")
        _negative_control(way, size, at=random.Random(seed).randrange(size * batch), seed=seed)
        way.fill_source(size, seed=seed + 2)


def prove_after(ways: Sequence[Direction], size: int, *, seed: int) -> None:
    """Prove that the timed transfers still move the pattern that `prove_before` left, given the same ``seed``.

    Raises:
        IntegrityError: Wrong bytes.
    """
    for way in ways:
        way.sink.fill(way.sink_where, size, seed=seed + 1)
        way.mover.transfer(size, runs=1)
        way.require(size, seed=seed + 2, when="after the timed transfers")


def _negative_control(way: Direction, size: int, *, at: int, seed: int) -> None:
    way.source.corrupt(way.source_where, size, at=at)
    way.mover.transfer(size, runs=1)
    mismatch = way.sink.verify(way.sink_where, size, seed=seed)
    if mismatch is None:
        raise IntegrityError(
            f"{way.name} of {format_size(size)}: byte {at} was corrupted on purpose, unnoticed by the check"
        )
    if mismatch.at != at:
        raise IntegrityError(f"{way.name} of {format_size(size)}: byte {at} was corrupted, and {_describe(mismatch)}")


def _describe(mismatch: Mismatch) -> str:
    return f"byte {mismatch.at} is {mismatch.found:#04x} in place of {mismatch.expected:#04x}"
