"""Batches of the soak: boxes of several buffers in one action, submitted again and again."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from skipper.dataplane import Operation, RDMAAction, RemoteLayout
from tests.soak.pattern import Bytes, content, described
from tests.soak.slots import Held, Slot

_ROWS = 60


@dataclass(frozen=True, slots=True)
class _Box:
    """Rows [top, bottom) and columns [left, right) of a buffer's bytes, taken as a grid of `width` columns."""

    width: int
    top: int
    bottom: int
    left: int
    right: int

    @classmethod
    def within(cls, chosen: random.Random, nbytes: int) -> "_Box":
        width = chosen.randint(8, min(nbytes, 512))
        height = nbytes // width
        top, left = chosen.randrange(height), chosen.randrange(width)
        bottom = chosen.randint(top + 1, min(height, top + _ROWS))
        return cls(width, top, bottom, left, chosen.randint(left + 1, width))

    @property
    def shape(self) -> tuple[int, int]:
        return self.bottom - self.top, self.right - self.left

    @property
    def layout(self) -> RemoteLayout:
        return RemoteLayout(self.top * self.width + self.left, self.shape, (self.width, 1), 1)

    def of(self, flat: Bytes) -> Bytes:
        """The box as a view of a buffer's bytes."""
        height = len(flat) // self.width
        return flat[: height * self.width].reshape(height, self.width)[self.top : self.bottom, self.left : self.right]


@dataclass(frozen=True, slots=True)
class _Part:
    held: Held
    box: _Box
    local: NDArray[np.uint8]
    writes: bool


class Program:
    """An action with what it has to bring about.

    Attributes:
        action: To be submitted after `prepare`.
        reads: Buffers that it reads.
        writes: Buffers that it writes.
    """

    def __init__(self, chosen: random.Random, present: Sequence[tuple[Slot, Held]]) -> None:
        self._slots = tuple(present)
        parts = []
        for _, held in present:
            box = _Box.within(chosen, held.nbytes)
            rows, columns = box.shape
            # Every second local side has a gap after each row.
            local = np.zeros((rows, columns * chosen.choice((1, 2))), np.uint8)[:, :columns]
            parts.append(_Part(held, box, local, chosen.random() < 0.4))
        self._parts = tuple(parts)
        self.reads = tuple(part.held for part in parts if not part.writes)
        self.writes = tuple(part.held for part in parts if part.writes)
        self.action = RDMAAction()
        for part in parts:
            if part.writes:
                self.action.write_remote(part.held.handle, part.local, layout=part.box.layout)
            else:
                self.action.read_remote(part.local, part.held.handle, layout=part.box.layout)

    @property
    def valid(self) -> bool:
        """Whether its buffers are still those that the slots hold."""
        return all(slot.held is held and not held.doubtful for slot, held in self._slots)

    def prepare(self) -> None:
        """Fill what is to be written, clear what is to be read."""
        for part in self._parts:
            if part.writes:
                held = part.held
                part.local[:] = part.box.of(content(held.number, held.versions, 0, held.nbytes))
                held.versions += 1
            else:
                part.local[:] = 0

    def check(self, _: Operation) -> str | None:
        """Compare what was read, note what was written."""
        wrong = None
        for part in self._parts:
            there = part.box.of(part.held.shadow)
            if part.writes:
                there[:] = part.local
            elif not np.array_equal(there, part.local):
                row = int(np.flatnonzero((there != part.local).any(axis=1))[0])
                at = (part.box.top + row) * part.box.width + part.box.left
                wrong = described(part.held.number, part.held.versions, at, there[row], part.local[row])
        return wrong
