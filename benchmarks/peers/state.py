"""What the peers of the store family share: the tensors, and the rows as a publisher and a reader do them.

Both are actors of the peer, in processes of their own. They take the time themselves, since the call that starts a row
is not part of it. A `sync` begins in one process and ends in the other, by the same clock (CLOCK_MONOTONIC); the time
until the reader knows that there is something to read counts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import torch

from skipper.benchmarks.errors import IntegrityError
from skipper.benchmarks.peers.protocol import Block, MeasuringTurn
from skipper.benchmarks.peers.work import BATCH_COUNT, BATCH_NBYTES, LARGE_NBYTES, SMALL_NBYTES, STATE_SHAPES, rows_of

__all__ = ["WARMUP", "Empty", "StoreTensors", "batch", "check", "large", "small", "state_dict", "syncing", "timing"]

WARMUP = 3
"""Runs of a row that are not timed: a store that uses two areas in turns is warm at the third put."""

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
    """Check that every element is ``value``.

    Raises:
        IntegrityError: One is not.
    """
    for name, tensor in state.items():
        if not bool((tensor == value).all()):
            raise IntegrityError(f"{name} does not hold what was put last")


class StoreTensors:
    """The tensors that a process of a store with torchstore's functions puts and gets, made when a row needs them."""

    def __init__(self, store: Any) -> None:
        self.state: dict[str, torch.Tensor] = {}
        self._store = store
        self._large: torch.Tensor | None = None
        self._batch: dict[str, torch.Tensor] = {}

    async def times(self, row: str, n: int, limit_s: float, *, key: str, **put: str) -> list[int]:
        """One turn of a row; durations in ns. The state dict is put at ``key``, with the arguments ``put``."""
        if row in ("put_512MiB", "get_512MiB") and self._large is None:
            self._large = large()
        if row.endswith("batch") and not self._batch:
            self._batch = batch()
        if not self.state:
            self.state = state_dict()
        ts, value, block, tensors, many = self._store, small(), self._large, self.state, self._batch
        actions: dict[str, Callable[[], Awaitable[object]]] = {
            "put_64B": lambda: ts.put("small", value),
            "get_64B": lambda: ts.get("small"),
            "put_512MiB": lambda: ts.put("large", block),
            "get_512MiB": lambda: ts.get("large", block),
            "put_state_dict": lambda: ts.put_state_dict(tensors, key, **put),
            "get_state_dict": lambda: ts.get_state_dict(key, tensors),
            "put_batch": lambda: ts.put_batch(many),
            "get_batch": lambda: ts.get_batch(many),
        }
        return await MeasuringTurn(n, limit_s).times_async(actions[row], warmup=WARMUP)


TimesOf = Callable[[str, int, float], list[int]]
"""Has a process time ``n`` samples of a row within a limit in seconds."""


def timing(writer: TimesOf, reader: TimesOf) -> dict[str, Block]:
    """Every row of the family but ``sync``; the writer puts once before the reader is timed."""

    def timed(row: str) -> Block:
        def block(turn: MeasuringTurn) -> list[int]:
            if row.startswith("put"):
                return writer(row, turn.n, turn.limit_s)
            writer(row.replace("get", "put"), 1, turn.limit_s)
            return reader(row, turn.n, turn.limit_s)

        return block

    return {row.name: timed(row.name) for row in rows_of("store") if row.name != "sync"}


def syncing(
    prepare: Callable[[int], object],
    publish: Callable[[], int],
    pull: Callable[[], int],
    verify: Callable[[int], object],
) -> Block:
    """The row ``sync``.

    Args:
        prepare: Fills the publisher's tensors with a number; this is not timed.
        publish: Publishes them; returns when that began, in ns.
        pull: Has the reader read them; returns when it had all, in ns.
        verify: Has the reader check that it holds a number.
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
