"""What the peers of the store family share: the tensors, and the rows as a publisher and a reader do them.

Both are actors of the peer, in processes of their own; it is they who take the time, since the way to them is not
what is measured. Only the clock of a `sync` begins in one process and ends in the other; it is the same clock
(CLOCK_MONOTONIC), and what tells the reader that there is something to read counts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from skipper.benchmarks.errors import IntegrityError
from skipper.benchmarks.peers.protocol import Block, MeasuringTurn
from skipper.benchmarks.peers.work import BATCH_COUNT, BATCH_NBYTES, LARGE_NBYTES, SMALL_NBYTES, STATE_SHAPES

__all__ = ["WARMUP", "Empty", "batch", "check", "large", "small", "state_dict", "syncing"]

WARMUP = 3
"""Runs of a row that are not timed: a store with two areas in turns is warm at the third put."""

Empty = Callable[..., torch.Tensor]
"""``torch.empty``, or what a peer has in its place."""


def small() -> torch.Tensor:
    """64 bytes."""
    return torch.zeros(SMALL_NBYTES // 4)


def large() -> torch.Tensor:
    """512 MiB, in memory that has been touched."""
    return torch.zeros(LARGE_NBYTES // 4)


def batch() -> dict[str, torch.Tensor]:
    """4,000 tensors of 16 KiB by key, in memory that has been touched."""
    return {f"batch.{number}": torch.zeros(BATCH_NBYTES // 4) for number in range(BATCH_COUNT)}


def state_dict(empty: Empty = torch.empty) -> dict[str, torch.Tensor]:
    """200 tensors, in memory that has been touched."""
    state = {f"layers.{number}.weight": empty(shape, dtype=torch.float32) for number, shape in enumerate(STATE_SHAPES)}
    for tensor in state.values():
        tensor.zero_()
    return state


def check(state: dict[str, torch.Tensor], value: float) -> None:
    """See that every element says ``value``.

    Raises:
        IntegrityError: One does not.
    """
    for name, tensor in state.items():
        if not bool((tensor == value).all()):
            raise IntegrityError(f"{name} does not hold what was put last")


def syncing(
    prepare: Callable[[int], object],
    publish: Callable[[], int],
    pull: Callable[[], int],
    verify: Callable[[int], object],
) -> Block:
    """The row ``sync``.

    Args:
        prepare: Fills the publisher's tensors with a number, which is not timed.
        publish: Publishes them; the moment at which it began.
        pull: Has the reader read them; the moment at which it had all.
        verify: Has the reader see that it holds a number.
    """

    def block(turn: MeasuringTurn) -> list[int]:
        durations: list[int] = []
        begun = 0
        for number in range(1, turn.n + WARMUP + 1):
            prepare(number)
            begin = publish()
            end = pull()
            if number <= WARMUP:
                verify(number)
                begun = end
            else:
                durations.append(end - begin)
                if not turn.goes_on(len(durations), begun):
                    break
        return durations

    return block
