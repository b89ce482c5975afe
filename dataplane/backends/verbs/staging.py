"""Stages GPU memory through host memory, if no RDMA device can register it.

Only this side of a transfer can be staged. A buffer for peers must be registered itself.
"""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from skipper.dataplane import tensors
from skipper.dataplane.backends.base import Done, Transfer
from skipper.dataplane.layout import Rows, extent
from skipper.dataplane.operation import Helper
from skipper.dataplane.regions import HOST, MemoryKind, Region, StridedRegion

_LOCAL, _REMOTE, _, _KEY, _, _DIMS = range(6)  # columns of rows, see rows.h


class HostStage:
    """Host memory in place of the local regions of rows.

    Attributes:
        rows: The same rows, with the stage as their local side.
        regions: The stage.
    """

    def __init__(self, rows: Rows, locals_: Sequence[Region]) -> None:
        self._place = (locals_[0].kind, locals_[0].device)
        self._pinned = tuple(locals_)
        self.rows: Rows = rows.copy()
        self._between: Rows = rows.copy()  # from the local memory to the stage
        self._between[:, _KEY] = 0
        for column in range(_DIMS, rows.shape[1], 3):
            self._between[:, column + 2] = self._between[:, column + 1]
        spans = _spans(locals_)
        arrays = [np.empty(high - low, np.uint8) for low, high in spans]
        starts = [low for low, _ in spans]
        for at, address in enumerate(rows[:, _LOCAL].tolist()):
            which = bisect_right(starts, address) - 1
            staged = _address(arrays[which]) + address - starts[which]
            self.rows[at, _LOCAL] = self._between[at, _REMOTE] = staged
        self.regions = tuple(Region(_address(array), array.nbytes, False, HOST, 0, array) for array in arrays)

    def fill(self) -> None:
        """Copy the local memory into the stage."""
        self._copy(to_stage=True)

    def empty(self) -> None:
        """Copy the stage into the local memory."""
        self._copy(to_stage=False)

    def _copy(self, *, to_stage: bool) -> None:
        tensors.DeviceRows(self._between, to_stage, self._place, [(MemoryKind.HOST, 0)]).copy()


class StagedTransfer(Transfer):
    """A transfer of a stage, with the copies between the stage and the real memory."""

    def __init__(self, stage: HostStage, inner: Transfer, *, to_remote: bool) -> None:
        self._stage = stage
        self._inner = inner
        self._to_remote = to_remote

    def start(self, deadline: float, done: Done) -> Helper | None:
        """See `Transfer`. A write fills the stage before this returns; the thread that ends a read empties it."""
        if not self._to_remote:
            return self._inner.start(deadline, lambda error: self._arrived(error, done))
        try:
            self._stage.fill()
        except Exception as error:  # noqa: BLE001 - whatever torch says of the caller's memory is the caller's
            done(error)
            return None
        return self._inner.start(deadline, done)

    def _arrived(self, error: BaseException | None, done: Done) -> None:
        if error is None:
            try:
                self._stage.empty()
            except Exception as failure:  # noqa: BLE001 - the same; it must not end the thread that carries others
                error = failure
        done(error)


def _spans(regions: Sequence[Region]) -> list[tuple[int, int]]:
    """[first, end) addresses of the ranges that regions cover; neighbours are joined, as in joined rows."""
    spans: list[tuple[int, int]] = []
    for low, high in sorted(map(_span, regions)):
        if spans and low <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(high, spans[-1][1]))
        else:
            spans.append((low, high))
    return spans


def _span(region: Region) -> tuple[int, int]:
    low, high = 0, region.nbytes
    if isinstance(region, StridedRegion):
        low, high = extent(region.shape, region.strides, region.itemsize)
    return region.address + low, region.address + high


def _address(array: NDArray[np.uint8]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
