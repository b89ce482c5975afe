"""`RDMAAction`: many transfers as one operation, compiled once and submitted as often as needed."""

import math
import operator
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from skipper.dataplane import process
from skipper.dataplane.backends.base import Peer, Remote, Transfer
from skipper.dataplane.buffer import RDMABuffer, gpus_of
from skipper.dataplane.errors import DataplaneError
from skipper.dataplane.layout import RemoteLayout, Row, as_rows, compile_box, extent, overlaps_itself, row_runs
from skipper.dataplane.memory import require_writable, strided
from skipper.dataplane.operation import DONE, Operation, require_timeout
from skipper.dataplane.process import BackendSelector
from skipper.dataplane.regions import MemoryKind, StridedRegion
from skipper.dataplane.stream_order import begin_in_order
from skipper.dataplane.uncollected import uncollected

_FEW = 64  # so few transfers are compiled before the garbage collector would run


@dataclass(slots=True)
class _RequestedCopy:
    """One transfer as requested, after its checks: a block of local memory, a box of a buffer of the same shape."""

    local: StridedRegion
    address: int
    buffer: RDMABuffer
    layout: RemoteLayout
    to_remote: bool

    @property
    def nbytes(self) -> int:
        return self.local.itemsize * math.prod(self.layout.shape)


@dataclass(slots=True)
class _PeerBatch:
    """The copies of an action in one direction, between one kind of memory here and one peer."""

    peer: Peer
    to_remote: bool
    rows: list[Row]
    remotes: list[Remote]
    keys: dict[tuple[int, int], int]
    locals: list[StridedRegion]


class RDMAAction:
    """A reusable batch of reads and writes between local memory and any number of buffers and owners.

    Build it with `read_remote` and `write_remote`, then `submit()` it as often as needed: the first submission compiles
    it, later ones replay the compiled form. It keeps all local memory alive, and transfers what that memory holds at
    the time of a submission. The transfers of one submission have no order; local destinations must not overlap.

    Only one thread may build an action; any thread may submit it.

    Example:
        ```python
        import numpy as np

        from skipper.dataplane import RDMAAction, RDMABuffer

        sources = [np.full(1000, number, dtype=np.float32) for number in range(3)]
        buffers = [RDMABuffer(source) for source in sources]
        mine = np.empty((3, 1000), dtype=np.float32)
        action = RDMAAction()
        for row, buffer in zip(mine, buffers):
            action.read_remote(row, buffer)
        action.submit().get()  # all in one operation; submit it again as often as you like
        print(mine[:, 0])  # [0. 1. 2.]
        ```
    """

    def __init__(self) -> None:
        self._parts: list[_RequestedCopy] = []
        self._lock = threading.Lock()
        self._compiled: tuple[object, list[Transfer]] | None = None  # and the selector that it was compiled with
        self._segments = 0
        self._nbytes = (0, 0)
        self._gpus: frozenset[int] = frozenset()
        # The objects of the last blocks: (the caller's object, its memory, checked), as "dst" and as "src".
        self._wholes: dict[str, tuple[object, StridedRegion]] = {}
        self._pieces: tuple[int, tuple[RDMAAction, ...]] | None = None

    def read_remote(
        self, dst: Any, buf: RDMABuffer, *, layout: RemoteLayout | None = None, at: Sequence[int] | None = None
    ) -> "RDMAAction":
        """Add a read from `buf` into `dst`.

        Args:
            dst: Tensor or array of any strides that does not overlap itself.
            buf: Where to read from.
            layout: The box of `buf` that has dst's shape and itemsize; None: the whole buffer, contiguous, in the
                order of dst's elements.
            at: Read only into the block of dst that begins at these indices and has layout's shape. Adding many blocks
                of one dst in succession costs less than slicing it.

        Returns:
            The action itself.

        Raises:
            TypeError: `dst` is no memory, `layout` no `RemoteLayout`, or an index no integer.
            ValueError: Shapes, sizes or ranges do not fit, `dst` is read-only or overlaps itself; `at` without layout.
        """
        return self._add(self._local(dst, "dst", at), "dst", buf, layout, at, to_remote=False)

    def write_remote(
        self, buf: RDMABuffer, src: Any, *, layout: RemoteLayout | None = None, at: Sequence[int] | None = None
    ) -> "RDMAAction":
        """Add a write of `src` into `buf`.

        Args:
            buf: Where to write to.
            src: Tensor or array of any strides.
            layout: The box of `buf` that has src's shape and itemsize; None: the whole buffer, contiguous, in the
                order of src's elements.
            at: Write only the block of src that begins at these indices and has layout's shape.

        Returns:
            The action itself.

        Raises:
            TypeError: `src` is no memory, `layout` no `RemoteLayout`, or an index no integer.
            ValueError: Shapes, sizes or ranges do not fit, the box overlaps itself, the buffer is read-only, or `at`
                without layout.
        """
        _require_buffer(buf)
        buf.require_writable()
        if layout is not None and overlaps_itself(layout.shape, layout.strides, layout.itemsize):
            raise ValueError(f"the remote box overlaps itself: {layout}")
        return self._add(self._local(src, "src", at), "src", buf, layout, at, to_remote=True)

    def submit(self, timeout: float = 60.0) -> Operation:
        """Run all transfers. Short ones with one owner have usually ended when this returns.

        Transfers of GPU memory begin after the work that is already queued on the current streams of this thread, like
        those of `RDMABuffer`.

        Args:
            timeout: Seconds until the operation ends with `TransferTimeoutError`.

        Returns:
            One operation for all transfers. If several owners fail, it raises the first failure, after the transfers
            with the other owners have ended.

        Raises:
            TypeError: The timeout is not a number.
            ValueError: It is not positive.
        """
        seconds = require_timeout(timeout)
        here = process.current()
        try:
            transfers = self._transfers(here.selector)
        except DataplaneError as error:
            return here.meter.follow(Operation.failed(error), 0, 0)
        if not transfers:
            return DONE
        if self._gpus:
            operation = begin_in_order(self._gpus, seconds, partial(_submit, transfers))
        else:
            operation = _submit(transfers, seconds)
        return here.meter.follow(operation, *self._nbytes)

    def split(self, nbytes: int) -> "tuple[RDMAAction, ...]":
        """Actions that together do what this one does; submit one after another to follow the progress.

        They are made once for each size and compiled once each; they do not have what is added here later.

        Args:
            nbytes: About how many bytes each of them moves; a row of a box is not divided.

        Raises:
            ValueError: `nbytes` is not positive.
        """
        if nbytes < 1:
            raise ValueError(f"the size of a piece must be positive, not {nbytes}")
        with self._lock:
            if self._pieces is None or self._pieces[0] != nbytes:
                self._pieces = nbytes, tuple(self._split(nbytes))
            return self._pieces[1]

    def _split(self, nbytes: int) -> "Iterator[RDMAAction]":
        piece, size = RDMAAction(), 0
        for whole in self._parts:
            for part in _slices(whole, nbytes):
                piece._parts.append(part)
                size += part.nbytes
                if size >= nbytes:
                    yield piece
                    piece, size = RDMAAction(), 0
        if piece._parts:
            yield piece

    @property
    def nbytes(self) -> int:
        """Bytes that one submission moves."""
        return sum(part.nbytes for part in self._parts)

    @property
    def segments(self) -> int:
        """Contiguous runs after coalescing; compiles the action if necessary.

        Raises:
            DataplaneError: No backend reaches one of the buffers.
        """
        self._transfers(process.current().selector)
        return self._segments

    def _local(self, data: Any, role: str, at: Sequence[int] | None) -> StridedRegion:
        whole = None if at is None else self._wholes.get(role)
        if whole is not None and whole[0] is data:
            return whole[1]
        local = strided(data, role)
        if role == "dst":
            require_writable(local, role)
            if overlaps_itself(local.shape, local.strides, local.itemsize):
                raise ValueError(f"dst overlaps itself: shape {local.shape} with strides {local.strides} bytes")
        if at is not None:
            self._wholes[role] = (data, local)
        return local

    def _add(
        self,
        local: StridedRegion,
        role: str,
        buf: RDMABuffer,
        layout: RemoteLayout | None,
        at: Sequence[int] | None,
        *,
        to_remote: bool,
    ) -> "RDMAAction":
        _require_buffer(buf)
        if layout is None:
            if at is not None:
                raise ValueError("a block that begins at some indices has the shape of a layout; give one")
            if local.nbytes != buf.nbytes:
                raise ValueError(f"{role} has {local.nbytes} bytes, the buffer {buf.nbytes}")
            layout, address = _contiguous_layout(local), local.address
        else:
            address = _check_layout(layout, local, role, at, buf)
        with self._lock:
            self._parts.append(_RequestedCopy(local, address, buf, layout, to_remote))
            self._compiled = self._pieces = None
        return self

    def _transfers(self, selector: BackendSelector) -> list[Transfer]:
        compiled = self._compiled
        if compiled is None or compiled[0] is not selector:  # as after a fork, or with another configuration
            with self._lock, uncollected() if len(self._parts) > _FEW else nullcontext():
                compiled = self._compiled = selector, self._compile()
        return compiled[1]

    def _compile(self) -> list[Transfer]:
        groups: dict[tuple[int, bool, MemoryKind, int], _PeerBatch] = {}
        gpus: set[int] = set()
        for part in self._parts:
            peer, remote, offset = part.buffer.route()
            where = (id(peer), part.to_remote, part.local.kind, part.local.device)
            group = groups.get(where)
            if group is None:
                group = groups[where] = _PeerBatch(peer, part.to_remote, [], [], {}, [])
            registration = (remote.word, remote.address)
            key = group.keys.setdefault(registration, len(group.remotes))
            if key == len(group.remotes):
                group.remotes.append(remote)
                gpus |= gpus_of(part.local, peer, remote)
            if not group.locals or group.locals[-1] is not part.local:
                group.locals.append(part.local)
            address = remote.address + offset + part.layout.offset
            group.rows += compile_box(
                part.address,
                part.local.strides,
                address,
                part.layout.strides,
                part.layout.shape,
                part.local.itemsize,
                key=key,
            )
        transfers = []
        self._segments = 0
        written = sum(part.nbytes for part in self._parts if part.to_remote)
        self._nbytes = self.nbytes - written, written
        self._gpus = frozenset(gpus)
        for group in groups.values():
            rows = as_rows(group.rows)
            self._segments += int(row_runs(rows).sum())
            transfers.append(group.peer.compile(rows, group.remotes, group.locals, to_remote=group.to_remote))
        return transfers


def _slices(part: _RequestedCopy, nbytes: int) -> Iterator[_RequestedCopy]:
    """A copy cut along the first dimension if that is possible, so that each slice moves about this many bytes."""
    layout = part.layout
    dim = next((dim for dim, count in enumerate(layout.shape) if count > 1), None)
    if part.nbytes <= nbytes or dim is None:
        yield part
        return
    count = layout.shape[dim]
    step = max(count * nbytes // part.nbytes, 1)
    for begin in range(0, count, step):
        shape = (*layout.shape[:dim], min(step, count - begin), *layout.shape[dim + 1 :])
        box = RemoteLayout(layout.offset + begin * layout.strides[dim], shape, layout.strides, layout.itemsize)
        address = part.address + begin * part.local.strides[dim]
        yield _RequestedCopy(part.local, address, part.buffer, box, part.to_remote)


def _submit(transfers: Sequence[Transfer], timeout: float) -> Operation:
    """Begin transfers with one peer or with several, or in both directions, as one operation."""
    if len(transfers) == 1:
        return transfers[0].submit(timeout)
    deadline = time.monotonic() + timeout
    operation = Operation(len(transfers))
    for transfer in transfers:
        helper = transfer.start(deadline, operation.part_done)
        if helper is not None:
            operation.add_helper(helper)
    return operation


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


def _check_layout(layout: Any, local: StridedRegion, role: str, at: Sequence[int] | None, buf: RDMABuffer) -> int:
    """Address of the block of `local` that belongs to a box."""
    if not isinstance(layout, RemoteLayout):
        raise TypeError(f"layout must be a RemoteLayout, not {type(layout).__name__}")
    if (
        len(layout.strides) != len(layout.shape)
        or len(local.shape) != len(layout.shape)
        or (at is None and tuple(layout.shape) != local.shape)
    ):
        raise ValueError(f"{role} has shape {local.shape}, the remote box {layout.shape} (strides {layout.strides})")
    address = local.address if at is None else _block_address(local, role, at, layout.shape)
    if layout.itemsize != local.itemsize:
        raise ValueError(f"{role} has elements of {local.itemsize} bytes, the remote box of {layout.itemsize}")
    low, high = extent(layout.shape, layout.strides, layout.itemsize)
    if not (layout.offset + low >= 0 and layout.offset + high <= buf.nbytes):  # of NaN neither is true
        raise ValueError(
            f"the remote box covers bytes [{layout.offset + low}, {layout.offset + high}) of a buffer of {buf.nbytes}"
        )
    return address


def _block_address(local: StridedRegion, role: str, at: Sequence[int], shape: Sequence[int]) -> int:
    if len(at) != len(shape):
        raise ValueError(f"{role} has {len(shape)} dimensions, at has {len(at)} indices")
    address = local.address
    for index, count, total, stride in zip(at, shape, local.shape, local.strides, strict=True):
        begin = operator.index(index)
        if begin < 0 or count <= 0 or begin + count > total:
            raise ValueError(f"{role} of shape {local.shape} has no block of shape {shape} at {tuple(at)}")
        address += begin * stride
    return address
