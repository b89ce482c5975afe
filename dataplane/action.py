"""`RDMAAction`: many transfers as one operation, compiled once and submitted as often as needed."""

import threading
import time
from dataclasses import dataclass
from typing import Any

from dataplane.backends.base import Peer, Remote, Transfer
from dataplane.buffer import RDMABuffer
from dataplane.errors import DataplaneError
from dataplane.layout import RemoteLayout, Row, as_rows, compile_box, extent, overlaps_itself, row_runs
from dataplane.memory import MemoryKind, StridedRegion, require_timeout, require_writable, strided
from dataplane.operation import DONE, Operation


@dataclass(frozen=True, slots=True)
class _Part:
    """One transfer as it was asked for, checked."""

    local: StridedRegion
    buffer: RDMABuffer
    layout: RemoteLayout
    to_remote: bool


@dataclass(slots=True)
class _Group:
    """What goes in one direction between one kind of memory here and one peer."""

    peer: Peer
    to_remote: bool
    rows: list[Row]
    remotes: list[Remote]
    keys: dict[tuple[int, int], int]
    locals: list[StridedRegion]


class RDMAAction:
    """A reusable batch of reads and writes between local memory and any number of buffers and owners.

    Build it with `read_remote` and `write_remote`, then `submit()` it, again and again: the first submission compiles
    it, later ones replay what was compiled. It keeps all local memory alive, and reads or writes whatever that memory
    holds at the time. Within one submission there is no order; local destinations must not overlap each other.

    Building is for one thread; submitting is for any.
    """

    def __init__(self) -> None:
        self._parts: list[_Part] = []
        self._lock = threading.Lock()
        self._compiled: list[Transfer] | None = None
        self._segments = 0

    def read_remote(self, dst: Any, buf: RDMABuffer, *, layout: RemoteLayout | None = None) -> "RDMAAction":
        """Add a read from `buf` into `dst`.

        Args:
            dst: Tensor or array of any strides that does not overlap itself.
            buf: Whence.
            layout: The box of `buf` that has dst's shape and itemsize; None: the whole buffer, contiguous, in the
                order of dst's elements.

        Returns:
            The action itself.

        Raises:
            TypeError: `dst` is no memory, or `layout` no `RemoteLayout`.
            ValueError: Shapes, sizes or ranges do not fit, `dst` is read-only or overlaps itself.
        """
        local = strided(dst, "dst")
        require_writable(local, "dst")
        if overlaps_itself(local.shape, local.strides, local.itemsize):
            raise ValueError(f"dst overlaps itself: shape {local.shape} with strides {local.strides} bytes")
        return self._add(local, "dst", buf, layout, to_remote=False)

    def write_remote(self, buf: RDMABuffer, src: Any, *, layout: RemoteLayout | None = None) -> "RDMAAction":
        """Add a write of `src` into `buf`.

        Args:
            buf: Whither.
            src: Tensor or array of any strides.
            layout: The box of `buf` that has src's shape and itemsize; None: the whole buffer, contiguous, in the
                order of src's elements.

        Returns:
            The action itself.

        Raises:
            TypeError: `src` is no memory, or `layout` no `RemoteLayout`.
            ValueError: Shapes, sizes or ranges do not fit, the box overlaps itself, the buffer is read-only.
        """
        local = strided(src, "src")
        _require_buffer(buf)
        buf.require_writable()
        if layout is not None and overlaps_itself(layout.shape, layout.strides, layout.itemsize):
            raise ValueError(f"the remote box overlaps itself: {layout}")
        return self._add(local, "src", buf, layout, to_remote=True)

    def submit(self, timeout: float = 60.0) -> Operation:
        """Run all transfers.

        Args:
            timeout: Seconds until the operation ends with `TransferTimeoutError`.

        Returns:
            One operation for all of it. When several owners fail, it raises the first failure, after the transfers
            with the other owners have ended.

        Raises:
            TypeError: The timeout is no number.
            ValueError: It is not positive.
        """
        deadline = time.monotonic() + require_timeout(timeout)
        try:
            transfers = self._transfers()
        except DataplaneError as error:
            return Operation.failed(error)
        if not transfers:
            return DONE
        operation = Operation(len(transfers))
        for transfer in transfers:
            helper = transfer.start(deadline, operation.part_done)
            if helper is not None:
                operation.add_helper(helper)
        return operation

    @property
    def nbytes(self) -> int:
        """Bytes that one submission moves."""
        return sum(part.local.nbytes for part in self._parts)

    @property
    def segments(self) -> int:
        """Contiguous runs after coalescing; compiles the action if it was not.

        Raises:
            DataplaneError: There is no way to one of the buffers.
        """
        self._transfers()
        return self._segments

    def _add(
        self, local: StridedRegion, role: str, buf: RDMABuffer, layout: RemoteLayout | None, *, to_remote: bool
    ) -> "RDMAAction":
        _require_buffer(buf)
        if layout is None:
            if local.nbytes != buf.nbytes:
                raise ValueError(f"{role} has {local.nbytes} bytes, the buffer {buf.nbytes}")
            layout = _contiguous_layout(local)
        else:
            _check_layout(layout, local, role, buf)
        with self._lock:
            self._parts.append(_Part(local, buf, layout, to_remote))
            self._compiled = None
        return self

    def _transfers(self) -> list[Transfer]:
        with self._lock:
            if self._compiled is None:
                self._compiled = self._compile()
            return self._compiled

    def _compile(self) -> list[Transfer]:
        groups: dict[tuple[int, bool, MemoryKind, int], _Group] = {}
        for part in self._parts:
            peer, remote, offset = part.buffer.route()
            where = (id(peer), part.to_remote, part.local.kind, part.local.device)
            group = groups.get(where)
            if group is None:
                group = groups[where] = _Group(peer, part.to_remote, [], [], {}, [])
            registration = (remote.word, remote.address)
            key = group.keys.setdefault(registration, len(group.remotes))
            if key == len(group.remotes):
                group.remotes.append(remote)
            group.locals.append(part.local)
            address = remote.address + offset + part.layout.offset
            group.rows += compile_box(
                part.local.address,
                part.local.strides,
                address,
                part.layout.strides,
                part.local.shape,
                part.local.itemsize,
                key=key,
            )
        transfers = []
        self._segments = 0
        for group in groups.values():
            rows = as_rows(group.rows)
            self._segments += int(row_runs(rows).sum())
            transfers.append(group.peer.compile(rows, group.remotes, group.locals, to_remote=group.to_remote))
        return transfers


def _require_buffer(buf: Any) -> None:
    if not isinstance(buf, RDMABuffer):
        raise TypeError(f"buf must be an RDMABuffer, not {type(buf).__name__}")


def _contiguous_layout(local: StridedRegion) -> RemoteLayout:
    strides = []
    step = local.itemsize
    for count in reversed(local.shape):
        strides.append(step)
        step *= count
    return RemoteLayout(0, local.shape, tuple(reversed(strides)), local.itemsize)


def _check_layout(layout: Any, local: StridedRegion, role: str, buf: RDMABuffer) -> None:
    if not isinstance(layout, RemoteLayout):
        raise TypeError(f"layout must be a RemoteLayout, not {type(layout).__name__}")
    if tuple(layout.shape) != local.shape or len(layout.strides) != len(layout.shape):
        raise ValueError(f"{role} has shape {local.shape}, the remote box {layout.shape} (strides {layout.strides})")
    if layout.itemsize != local.itemsize:
        raise ValueError(f"{role} has elements of {local.itemsize} bytes, the remote box of {layout.itemsize}")
    low, high = extent(layout.shape, layout.strides, layout.itemsize)
    if layout.offset + low < 0 or layout.offset + high > buf.nbytes:
        raise ValueError(
            f"the remote box covers bytes [{layout.offset + low}, {layout.offset + high}) of a buffer of {buf.nbytes}"
        )
