"""The two ends of the benchmark: each has memory that the other end works on one-sidedly, and transfers of its own.

Client and server are the same `Side`. The client drives its own side by calls and the server's by requests, through a
`FarSide` with the same methods: reads, writes and both directions at once need no code of their own.

A size may stand for many buffers (``--batch``): they form one stream of ``batch * size`` bytes, in which
byte ``i * size`` is the first of buffer ``i``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from skipper import dataplane
from skipper.benchmarks.backends import require_backend
from skipper.benchmarks.bandwidth import memory
from skipper.benchmarks.bandwidth.channel import MessageChannel
from skipper.benchmarks.bandwidth.memory import Memory, allocate
from skipper.benchmarks.bandwidth.messages import (
    ATOMICS,
    Connect,
    Corrupt,
    Done,
    Elapsed,
    Fill,
    Goodbye,
    IntegrityVerdict,
    Mismatch,
    Offer,
    TransferOrder,
    Verify,
    Where,
    Which,
    Wire,
    Workload,
    ask,
    read_answer,
    tell,
)
from skipper.benchmarks.errors import UsageError
from skipper.benchmarks.machine import available_nbytes

__all__ = ["End", "FarSide", "Side", "configure", "footprint", "patience", "require_feasible"]

FIRST_TRANSFER = 4096
"""Bytes of the very first transfer, whose time is the price of connecting."""

_USABLE_SHARE = 0.9  # share of the free memory that may be used; other programs need the rest
SLOWEST_BYTES_PER_S = 100e6
"""Below any rate at which a machine fills or reads its own memory, also with fresh pages and a busy core."""


class End(Protocol):
    """What the proof of integrity needs from either end."""

    def fill(self, where: Where, size: int, *, seed: int) -> None:
        """Write the pattern of ``seed``."""

    def verify(self, where: Where, size: int, *, seed: int) -> Mismatch | None:
        """The first byte that is not of the pattern."""

    def corrupt(self, where: Where, size: int, *, at: int) -> None:
        """Flip one byte of the stream."""

    def transfer(self, size: int, *, runs: int) -> int:
        """Transfer ``runs`` times, and say how many ns that took together."""


class Side:
    """The end of this process. It allocates when it is made, can transfer once connected, and frees all in `close`."""

    def __init__(self, workload: Workload, *, exposes: bool, transfers: bool) -> None:
        """Allocate what ``workload`` needs, pages in place.

        Args:
            workload: What both ends agreed on.
            exposes: The peer works on this end's memory: ``batch`` buffers of the largest size.
            transfers: This end transfers: one run of memory, the source or destination of all buffers.
        """
        self._workload = workload
        # The shm backend reaches shared memory only. Other backends get plain memory, such as any program has.
        shared = workload.backend in ("auto", "shm")
        count = workload.batch if exposes else 0
        self._exposed = [allocate(workload.mem, workload.largest, shared=shared) for _ in range(count)]
        total = workload.largest * workload.batch
        alone = exposes and workload.beside_one
        self._together: Memory | None = allocate(workload.mem, total, shared=shared) if alone else None
        self._local: Memory | None = allocate(workload.mem, total) if transfers else None
        self._buffers: list[dataplane.RDMABuffer] = []
        self._remote: list[dataplane.RDMABuffer] = []
        self._actions: dict[int, dataplane.RDMAAction] = {}
        self._movers: dict[int, Callable[[], object]] = {}

    def expose(self) -> tuple[list[bytes], float]:
        """Register the exposed buffers.

        Returns:
            Their descriptors for the peer, and what registering cost in µs (including, the first time,
            starting the backend).
        """
        begin_ns = time.perf_counter_ns()
        pieces = self._exposed if self._together is None else [*self._exposed, self._together]
        views = [piece.part(0, piece.nbytes) for piece in pieces]
        self._buffers = [dataplane.RDMABuffer(view) for view in views]
        descriptors = [buffer.serialize() for buffer in self._buffers]
        return descriptors, (time.perf_counter_ns() - begin_ns) / 1e3

    def connect(self, descriptors: list[bytes]) -> float:
        """Take the peer's buffers, and transfer a few bytes once.

        Returns:
            What that cost in µs: reading the descriptors, reaching the peer, mapping its memory.
        """
        begin_ns = time.perf_counter_ns()
        self._remote = [dataplane.RDMABuffer.deserialize(descriptor) for descriptor in descriptors]
        first = min(FIRST_TRANSFER, self._workload.largest)
        self._one_buffer(self._remote[0].at(0, first), self.local.part(0, first))()
        return (time.perf_counter_ns() - begin_ns) / 1e3

    @property
    def backend(self) -> str:
        """Name of the backend that transfers from here use."""
        return self._remote[0].backend

    @property
    def addresses(self) -> list[int]:
        """Where the exposed buffers are, for memory of the host."""
        return [piece.address for piece in self._exposed if piece.address is not None]

    @property
    def local(self) -> Memory:
        """What this end transfers from or to, all buffers one after another."""
        if self._local is None:
            raise RuntimeError("this end was made without memory to transfer from")
        return self._local

    def mover(self, size: int) -> Callable[[], object]:
        """A call that transfers ``batch`` buffers of ``size`` bytes once and returns when they have arrived."""
        if size not in self._movers:
            buffers = [buffer.at(0, size) for buffer in self._remote[: self._workload.batch]]
            locals_ = [self.local.part(i * size, (i + 1) * size) for i in range(len(buffers))]
            if len(buffers) == 1:
                self._movers[size] = self._one_buffer(buffers[0], locals_[0])
            else:
                action = dataplane.RDMAAction()
                for buffer, part in zip(buffers, locals_, strict=True):
                    if self._workload.op == "read":
                        action.read_remote(part, buffer)
                    else:
                        action.write_remote(buffer, part)
                self._actions[size] = action
                self._movers[size] = lambda: action.submit(timeout=self._workload.timeout_s).get()
        return self._movers[size]

    def segments(self, size: int) -> int:
        """Contiguous runs that a transfer of ``size`` consists of: neighbours in the batch may be joined to one."""
        self.mover(size)
        return self._actions[size].segments if size in self._actions else 1

    def together(self, size: int) -> Callable[[], object]:
        """A call that moves as many bytes as the batch does, between the same memory here and one buffer there.

        Raises:
            RuntimeError: The workload has no such buffer.
        """
        if not self._workload.beside_one:
            raise RuntimeError("a batch of one has nothing to be compared with")
        total = size * self._workload.batch
        return self._one_buffer(self._remote[-1].at(0, total), self.local.part(0, total))

    def remote(self, size: int) -> dataplane.RDMABuffer:
        """The beginning of the first of the peer's buffers."""
        return self._remote[0].at(0, size)

    def _one_buffer(self, buffer: dataplane.RDMABuffer, part: object) -> Callable[[], object]:
        timeout = self._workload.timeout_s
        if self._workload.atomic:
            return lambda: buffer.fetch_add(0, timeout=timeout).get()
        if self._workload.op == "read":
            return lambda: buffer.read_into(part, timeout=timeout).get()
        return lambda: buffer.write_from(part, timeout=timeout).get()

    def fill(self, where: Where, size: int, *, seed: int) -> None:
        """Write the pattern of ``seed`` into the stream."""
        for piece, begin, offset in self._pieces(where, size):
            memory.fill(piece, begin, begin + size, seed=seed, offset=offset)

    def verify(self, where: Where, size: int, *, seed: int) -> Mismatch | None:
        """Find the first byte of the stream that is not of the pattern of ``seed``."""
        for piece, begin, offset in self._pieces(where, size):
            mismatch = memory.first_mismatch(piece, begin, begin + size, seed=seed, offset=offset)
            if mismatch is not None:
                return mismatch
        return None

    def corrupt(self, where: Where, size: int, *, at: int) -> None:
        """Flip the bits of byte ``at`` of the stream."""
        for piece, begin, offset in self._pieces(where, size):
            if offset <= at < offset + size:
                place = begin + at - offset
                piece.put(place, ~piece.peek(place, place + 1))
                return
        raise ValueError(f"there is no byte {at} in {self._workload.batch} x {size} bytes")

    def transfer(self, size: int, *, runs: int) -> int:
        """Transfer ``runs`` times, and say how many ns that took together."""
        mover = self.mover(size)
        begin_ns = time.perf_counter_ns()
        for _ in range(runs):
            mover()
        return time.perf_counter_ns() - begin_ns

    def close(self) -> None:
        """Drop the buffers and release the memory; safe to repeat."""
        self._movers.clear()
        self._actions.clear()
        self._remote.clear()
        for buffer in self._buffers:
            buffer.drop()
        self._buffers.clear()
        self._exposed.clear()
        self._local = self._together = None

    def _pieces(self, where: Where, size: int) -> Iterator[tuple[Memory, int, int]]:
        """Each buffer's memory, where it begins there, and its offset in the stream."""
        if not 0 < size <= self._workload.largest:
            raise ValueError(f"{size} bytes do not fit the {self._workload.largest} agreed on")
        for index in range(self._workload.batch):
            if where == "exposed":
                yield self._exposed[index], 0, index * size
            else:
                yield self.local, index * size, index * size


def patience(workload: Workload) -> float:
    """Seconds after which an end that has not answered counts as lost: one transfer, and work on its memory."""
    return workload.timeout_s + 10.0 + 2 * workload.largest * workload.batch / SLOWEST_BYTES_PER_S


@dataclass(frozen=True, slots=True)
class FarSide:
    """The server's end as the client sees it. Every method raises `PeerError` when the server fails."""

    channel: MessageChannel
    workload: Workload

    def open(self) -> tuple[Offer, list[bytes]]:
        """Have the server allocate and register; returns the handles of its buffers."""
        offer = ask(self.channel, self.workload, Offer, timeout=patience(self.workload))
        return offer, [self.channel.receive() for _ in range(self.workload.handles)]

    def connect(self, descriptors: list[bytes]) -> None:
        """Give the server this side's buffers, for the other direction."""
        tell(self.channel, Connect(handles=len(descriptors)))
        for descriptor in descriptors:
            self.channel.send(descriptor)
        read_answer(self.channel, Done, timeout=patience(self.workload))

    def fill(self, where: Where, size: int, *, seed: int) -> None:
        """Write the pattern of ``seed``."""
        ask(self.channel, Fill(where=where, size=size, seed=seed), Done, timeout=patience(self.workload))

    def verify(self, where: Where, size: int, *, seed: int) -> Mismatch | None:
        """The first byte that is not of the pattern."""
        request = Verify(where=where, size=size, seed=seed)
        return ask(self.channel, request, IntegrityVerdict, timeout=patience(self.workload)).mismatch

    def corrupt(self, where: Where, size: int, *, at: int) -> None:
        """Flip one byte of the stream."""
        ask(self.channel, Corrupt(where=where, size=size, at=at), Done)

    def start_transfer(self, size: int, *, runs: int) -> None:
        """Have the server begin to transfer."""
        tell(self.channel, TransferOrder(size=size, runs=runs))

    def finish_transfer(self, *, runs: int) -> int:
        """Wait for the transfers that `start_transfer` began; returns their ns."""
        limit = self.workload.timeout_s * runs + 10.0
        return read_answer(self.channel, Elapsed, timeout=limit).elapsed_ns

    def transfer(self, size: int, *, runs: int) -> int:
        """Have the server transfer, and wait for it."""
        self.start_transfer(size, runs=runs)
        return self.finish_transfer(runs=runs)

    def link(self, backend: str) -> Wire:
        """The link of the server's end."""
        return ask(self.channel, Which(backend=backend), Wire)

    def goodbye(self) -> None:
        """End the session."""
        ask(self.channel, Goodbye(), Done, timeout=patience(self.workload))


def configure(workload: Workload, net_devices: str | None, *, secret: bytes, listen: str | None = None) -> None:
    """Tell the data plane of this process what the run is to use.

    Args:
        workload: Names the backend and the copy threads.
        net_devices: Network devices that UCX may use, or RDMA devices that verbs uses; ``None`` for what this process
            uses anyway, and the first active port.
        secret: What handles are proved by, see `channel.handle_secret`.
        listen: Address at which verbs lets peers of other hosts connect.
    """
    ucx = None if net_devices is None else {"NET_DEVICES": net_devices}
    verbs: dict[str, object] = {}
    if workload.backend == "verbs" and net_devices is not None:
        verbs["device"] = net_devices.split(",")
    if listen is not None:
        verbs["listen"] = f"[{listen}]:0" if ":" in listen else f"{listen}:0"
    threads = workload.copy_threads or None
    dataplane.configure(backend=workload.backend, copy_threads=threads, ucx=ucx, verbs=verbs, secret=secret)


def footprint(workload: Workload, *, client: bool) -> int:
    """Bytes of payload memory that one end allocates for ``workload``."""
    total = workload.largest * workload.batch
    if client:
        return total * (3 if workload.bidirectional else 2)  # local, the yardstick's copy, exposed
    return total * (2 if workload.bidirectional or workload.beside_one else 1)  # exposed, and local or one buffer more


def require_feasible(workload: Workload, nbytes: int) -> None:
    """Check before anything is allocated that this machine has the backend, the kind of memory and enough of it.

    Args:
        workload: What is to be done here.
        nbytes: Payload memory that the run takes on this host, by both ends together if both are here.

    Raises:
        UsageError: One clear sentence about what is missing.
    """
    if workload.op not in ("read", "write", *ATOMICS) or workload.batch < 1 or workload.largest < 1:
        raise UsageError(f"{workload.batch} x {workload.largest} bytes cannot be moved by {workload.op!r}")
    if not 0 < workload.timeout_s < 1e6:
        raise UsageError(f"the deadline must be more than 0 s and less than 1e6 s, not {workload.timeout_s} s")
    require_backend(workload.backend)
    if workload.mem != "host":
        _require_cuda(workload.mem)
    elif nbytes > _USABLE_SHARE * available_nbytes():
        need, free = (f"{amount / 2**30:.1f} GiB" for amount in (nbytes, available_nbytes()))
        raise UsageError(f"this needs {need} of memory and {free} are free; use a smaller --size or --batch")


def _require_cuda(mem: str) -> None:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = int(mem.partition(":")[2] or 0)
    if index >= count:
        have = f"{count} of them" if count else "none"
        raise UsageError(f"--mem {mem} needs a GPU that torch can use as number {index}; it sees {have}")
