"""What a process can be told to do with the buffers of another one."""

import os
import threading
from collections.abc import Callable
from multiprocessing import Pipe

import numpy as np

from skipper.dataplane import RDMAAction, RDMABuffer

PATIENCE_S = 20.0


class Visitor:
    """A peer of some owner. Every method takes a handle, and returns when it is done."""

    def read(self, handle: bytes, nbytes: int, times: int) -> bytes:
        """What the buffer held the last time."""
        buffer = RDMABuffer.deserialize(handle)
        into = np.empty(nbytes, np.uint8)
        for _ in range(times):
            buffer.read_into(into, timeout=PATIENCE_S).get()
        return into.tobytes()

    def write(self, handle: bytes, content: bytes, times: int, timeout: float = PATIENCE_S) -> None:
        buffer = RDMABuffer.deserialize(handle)
        for _ in range(times):
            buffer.write_from(content, timeout=timeout).get()

    def write_without_end(self, handle: bytes, nbytes: int, value: int) -> None:
        """Be always in the middle of a write."""
        buffer = RDMABuffer.deserialize(handle)
        source = np.full(nbytes, value, np.uint8)
        while True:
            buffer.write_from(source, timeout=PATIENCE_S).get()

    def read_in_a_fork(self, handle: bytes, nbytes: int) -> bytes:
        """Read here first, then what a child reads that was forked from here."""
        buffer, into = RDMABuffer.deserialize(handle), bytearray(nbytes)
        return _again_in_a_fork(lambda: buffer.read_into(into, timeout=PATIENCE_S).get(), into)

    def submit_in_a_fork(self, handle: bytes, nbytes: int) -> bytes:
        """The same with an action that was submitted here first."""
        into = bytearray(nbytes)
        action = RDMAAction().read_remote(into, RDMABuffer.deserialize(handle))
        return _again_in_a_fork(lambda: action.submit(timeout=PATIENCE_S).get(), into)

    def read_parts(self, handle: bytes, content: bytes, threads: int, times: int) -> int:
        """Read parts at random in several threads at once; how many were not as in `content`."""
        buffer = RDMABuffer.deserialize(handle)
        wrong = []

        def reader(seed: int) -> None:
            random = np.random.default_rng(seed)
            for _ in range(times):
                begin, end = sorted(int(n) for n in random.choice(len(content), 2, replace=False))
                into = bytearray(end - begin)
                buffer.at(begin, end - begin).read_into(into, timeout=PATIENCE_S).get()
                if into != content[begin:end]:
                    wrong.append((begin, end))

        readers = [threading.Thread(target=reader, args=(seed,)) for seed in range(threads)]
        for thread in readers:
            thread.start()
        for thread in readers:
            thread.join()
        return len(wrong)

    def add(self, handle: bytes, offset: int, value: int, times: int) -> list[int]:
        """Add to a word again and again; what it held before each time."""
        buffer = RDMABuffer.deserialize(handle)
        return [buffer.fetch_add(value, offset=offset, timeout=PATIENCE_S).get() for _ in range(times)]

    def count_under_a_lock(self, handle: bytes, me: int, times: int) -> None:
        """Word 0 is a lock, word 1 is counted up by a read and a write, which only the lock keeps together."""
        buffer = RDMABuffer.deserialize(handle)
        lock, counter = buffer.at(0, 8), buffer.at(8, 8)
        mine = np.zeros(1, np.uint64)
        for _ in range(times):
            while lock.compare_and_swap(0, me, timeout=PATIENCE_S).get() != 0:
                pass
            counter.read_into(mine, timeout=PATIENCE_S).get()
            mine += 1
            counter.write_from(mine, timeout=PATIENCE_S).get()
            if lock.compare_and_swap(me, 0, timeout=PATIENCE_S).get() != me:
                raise AssertionError("the lock had another holder")


def _again_in_a_fork(read: Callable[[], None], into: bytearray) -> bytes:
    """Do it here, then what is there when a child has done it that was forked from here."""
    read()
    into[:] = bytes(len(into))
    here, there = Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        try:
            read()
            there.send((None, bytes(into)))
        except Exception as error:  # noqa: BLE001 - the parent raises it
            there.send((error, b""))
        os._exit(0)
    there.close()
    error, content = here.recv()
    os.waitpid(child, 0)
    if error is not None:
        raise error
    return bytes(content)
