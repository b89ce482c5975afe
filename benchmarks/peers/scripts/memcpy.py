"""The floor of everything that moves bytes within a host: the C library's memcpy, one thread, warm memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np

from skipper.benchmarks.machine import memcpy
from skipper.benchmarks.peers.memory import Bytes, Operation, fill, holds, memory_blocks
from skipper.benchmarks.peers.protocol import Block
from skipper.benchmarks.peers.work import (
    BATCH_COUNT,
    BATCH_NBYTES,
    REGION_NBYTES,
    ROWS,
    STATE_SHAPES,
    Family,
    Span,
    rows_of,
)

__all__ = ["CANNOT", "open_blocks"]

CANNOT = {row.name: "another peer is the floor of this row" for row in ROWS if row.yardstick != "memcpy"}


def open_blocks(family: Family, _stack: ExitStack) -> dict[str, Block]:
    """See `benchmarks.peers.child`."""
    region = _Region()
    if family == "memory":
        return memory_blocks(region)
    state, end = [], 0
    for rows, columns in STATE_SHAPES:
        state.append((end, rows * columns * 4))
        end += rows * columns * 4
    batch = [(number * BATCH_NBYTES, BATCH_NBYTES) for number in range(BATCH_COUNT)]
    many = dict.fromkeys(("put_state_dict", "get_state_dict", "sync"), state)
    many |= dict.fromkeys(("put_batch", "get_batch"), batch)
    blocks: dict[str, Block] = {}
    for row in rows_of(family):
        if row.yardstick == "memcpy":
            blocks[row.name] = _copying(region, many.get(row.name, [(0, row.amount)]))
    return blocks


def _copying(region: _Region, spans: Sequence[Span]) -> Block:
    move = region.operation(spans, write=False)
    region.fill(spans, 1)  # reading memory that was never written reads one page of zeros
    return lambda turn: turn.times(move, warmup=2)


class _Region:
    def __init__(self) -> None:
        self.local: Bytes = np.empty(REGION_NBYTES, np.uint8)
        self._far: Bytes = np.empty(REGION_NBYTES, np.uint8)

    def operation(self, spans: Sequence[Span], *, write: bool) -> Operation:
        copy = memcpy()
        source, target = (self.local, self._far) if write else (self._far, self.local)
        calls = [(target.ctypes.data + offset, source.ctypes.data + offset, nbytes) for offset, nbytes in spans]

        def move(_keep: object = (source, target)) -> None:  # the calls hold addresses only
            for call in calls:
                copy(*call)

        return move

    def fill(self, spans: Sequence[Span], value: int) -> None:
        fill(self._far, spans, value)

    def holds(self, spans: Sequence[Span], value: int) -> bool:
        return holds(self._far, spans, value)
