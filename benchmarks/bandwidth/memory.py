"""Memory that transfers go to and from, of the host or of a GPU, and the data pattern in it.

The pattern is a seeded random tile, repeated. The tile's length is prime, so bytes that land at the wrong place (off by
a page, a buffer, any power of two) are wrong bytes, and the check finds them at the speed of memory.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from skipper import dataplane
from skipper.benchmarks.bandwidth.messages import Mismatch
from skipper.benchmarks.machine import memcpy

__all__ = ["Memory", "allocate", "fill", "first_mismatch"]

TILE = 1_048_573
"""Largest prime below 2**20."""

Bytes = NDArray[np.uint8]


class Memory(Protocol):
    """Contiguous bytes, in memory of the host or of a GPU."""

    nbytes: int

    @property
    def address(self) -> int | None:
        """Where it begins in this process, or ``None`` when the CPU cannot reach it."""

    def part(self, begin: int, end: int) -> Any:
        """A view of ``[begin, end)`` that `dataplane` takes."""

    def put(self, begin: int, data: Bytes) -> None:
        """Overwrite from ``begin`` on."""

    def peek(self, begin: int, end: int) -> Bytes:
        """The bytes of ``[begin, end)``: a view where the CPU can reach them, else a copy."""

    def copier(self, source: Memory, nbytes: int) -> Callable[[], object]:
        """A call that copies the beginning of ``source`` to the beginning of this: the yardstick."""


class HostMemory:
    """Memory of this process, as a numpy array."""

    def __init__(self, array: Bytes) -> None:
        self._array = array
        self.nbytes = array.nbytes

    @property
    def address(self) -> int | None:
        """Where it begins in this process."""
        return int(self._array.ctypes.data)

    def part(self, begin: int, end: int) -> Bytes:
        """A view of ``[begin, end)``."""
        return self._array[begin:end]

    def put(self, begin: int, data: Bytes) -> None:
        """Overwrite from ``begin`` on."""
        self._array[begin : begin + data.nbytes] = data

    def peek(self, begin: int, end: int) -> Bytes:
        """A view of ``[begin, end)``."""
        return self._array[begin:end]

    def copier(self, source: Memory, nbytes: int) -> Callable[[], object]:
        """A call of the C library's memcpy in one thread: the reference for this library's own copy."""
        if source.address is None or nbytes > min(self.nbytes, source.nbytes):
            raise ValueError(f"{nbytes} bytes cannot be copied here by memcpy")
        return functools.partial(memcpy(), self._array.ctypes.data, source.address, nbytes)


class CudaMemory:
    """Memory of a GPU, as a torch tensor. torch is imported only when such memory is asked for."""

    address = None

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor
        self.nbytes: int = tensor.nbytes

    def part(self, begin: int, end: int) -> Any:
        """A view of ``[begin, end)``."""
        return self._tensor[begin:end]

    def put(self, begin: int, data: Bytes) -> None:
        """Overwrite from ``begin`` on, and wait for it."""
        import torch

        self._tensor[begin : begin + data.nbytes].copy_(torch.from_numpy(np.ascontiguousarray(data)))
        torch.cuda.synchronize(self._tensor.device)

    def peek(self, begin: int, end: int) -> Bytes:
        """A copy of ``[begin, end)`` in host memory."""
        copy: Bytes = self._tensor[begin:end].cpu().numpy()
        return copy

    def copier(self, source: Memory, nbytes: int) -> Callable[[], object]:
        """A call that copies on the device, and waits for it."""
        import torch

        target, origin = self._tensor[:nbytes], source.part(0, nbytes)

        def copy() -> None:
            target.copy_(origin)
            torch.cuda.synchronize(target.device)

        return copy


def allocate(mem: str, nbytes: int, *, shared: bool = False) -> Memory:
    """Get memory, with its pages in place.

    Args:
        mem: ``host``, ``cuda`` or ``cuda:N``.
        nbytes: How much.
        shared: Host memory that processes of this host can map (`dataplane.empty_array`).
    """
    if mem != "host":
        import torch

        return CudaMemory(torch.zeros(nbytes, dtype=torch.uint8, device=mem))
    array: Bytes = dataplane.empty_array((nbytes,), np.uint8) if shared else np.empty(nbytes, np.uint8)
    # The first touch of a page costs several times the copy into it. Here it is part of no figure.
    array.fill(0)
    return HostMemory(array)


def fill(memory: Memory, begin: int, end: int, *, seed: int, offset: int) -> None:
    """Write the pattern of ``seed``, from its position ``offset`` on, into ``[begin, end)``."""
    for at in range(begin, end, TILE):
        length = min(TILE, end - at)
        memory.put(at, _pattern(seed, offset + at - begin, length))


def first_mismatch(memory: Memory, begin: int, end: int, *, seed: int, offset: int) -> Mismatch | None:
    """Find the first byte of ``[begin, end)`` that is not of the pattern; positions are the pattern's."""
    for at in range(begin, end, TILE):
        length = min(TILE, end - at)
        expected = _pattern(seed, offset + at - begin, length)
        found = memory.peek(at, at + length)
        if not np.array_equal(found, expected):
            index = int(np.flatnonzero(found != expected)[0])
            return Mismatch(at=offset + at - begin + index, expected=int(expected[index]), found=int(found[index]))
    return None


def _pattern(seed: int, offset: int, length: int) -> Bytes:
    """``length`` <= `TILE` bytes of the pattern from position ``offset`` on."""
    phase = offset % TILE
    return _two_tiles(seed)[phase : phase + length]


@functools.lru_cache(maxsize=4)
def _two_tiles(seed: int) -> Bytes:
    # Twice in a row, so that any run of TILE bytes is one slice, at any phase.
    tile = random.Random(seed).randbytes(TILE)
    return np.frombuffer(tile + tile, np.uint8)
