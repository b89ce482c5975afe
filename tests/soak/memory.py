"""The owners' side: a process that registers, drops and frees buffers as it is told, and has no part in transfers."""

import ctypes
import gc
import os
import sys
import time
from collections import deque
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from skipper import dataplane
from skipper.dataplane import RDMABuffer
from tests.soak.pattern import content

_REST_S = (
    5.0  # memory of a dropped buffer is given to nobody else for so long: the last bytes of a write may be on the way
)


class Memory:
    """What an owner holds."""

    def __init__(self, *, shared: bool) -> None:
        self._shared = shared
        self._arrays: dict[int, Any] = {}
        self._buffers: dict[int, RDMABuffer] = {}
        self._resting: deque[tuple[float, Any]] = deque()

    def make(self, number: int, nbytes: int) -> bytes:
        """Register the first version of a buffer; its handle."""
        array = dataplane.empty_array(nbytes, np.uint8) if self._shared else np.empty(nbytes, np.uint8)
        array[:] = content(number, 0, 0, nbytes)
        self._arrays[number] = array
        self._buffers[number] = buffer = RDMABuffer(array)
        return buffer.serialize()

    def drop(self, number: int) -> None:
        """Drop it; its memory rests before it goes back."""
        now = time.monotonic()
        self._buffers.pop(number).drop()
        self._resting.append((now, self._arrays.pop(number)))
        while now - self._resting[0][0] > _REST_S:
            self._resting.popleft()

    def flip(self, number: int, offset: int) -> None:
        """Change a bit behind everybody's back."""
        self._arrays[number][offset] ^= 1

    def footprint(self) -> dict[str, int]:
        """What this process holds of the system; see the function."""
        return footprint()


def footprint() -> dict[str, int]:
    """What this process holds: file descriptors, threads, mappings, and KiB of memory of its own and shared.

    What the allocator keeps for later is given back first: only what somebody holds can be a leak.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/status", encoding="ascii") as file:
        status = dict(line.split(":", 1) for line in file)
    with open("/proc/self/maps", "rb") as maps:
        mappings = sum(1 for _ in maps)
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "mappings": mappings,
        "anonymous_kib": int(status["RssAnon"].split()[0]),
        "shared_kib": int(status["RssShmem"].split()[0]),
    }


def _serve(connection: "Connection[Any, Any]") -> None:
    settings, shared = connection.recv()
    dataplane.configure(**settings)
    memory = Memory(shared=shared)
    while True:
        try:
            method, args = connection.recv()
        except EOFError:
            return
        connection.send(getattr(memory, method)(*args))


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
