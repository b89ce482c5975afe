"""`RDMABuffer` in its own process: what may be registered, how long, and what the object says of itself."""

import copy
import gc
import pickle
import sys
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from skipper import dataplane
from skipper.dataplane import BufferDroppedError, RDMAAction, RDMABuffer, process


@pytest.mark.parametrize(
    "data",
    [
        bytearray(b"abcdef"),
        memoryview(bytearray(b"abcdef")),
        np.arange(6, dtype=np.int64),
        np.zeros((2, 3), np.float16),
        np.array(["2026-11-21"], "datetime64[D]"),
        dataplane.empty_array((3, 2), np.int32),
    ],
    ids=lambda data: type(data).__name__,
)
def test_memory_of_any_kind_can_be_registered(data: Any) -> None:
    buffer = RDMABuffer(data)
    assert buffer.nbytes == buffer.size() == data.nbytes if hasattr(data, "nbytes") else len(data)
    assert buffer.owner == process.current().owner
    assert buffer.backend == "local"


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (np.zeros((4, 4))[:, ::2], ValueError),
        (np.zeros(0), ValueError),
        (bytearray(), ValueError),
        (b"read-only", ValueError),
        ([1, 2], TypeError),
        ("text", TypeError),
        (None, TypeError),
        (3, TypeError),
    ],
    ids=repr,
)
def test_what_cannot_be_registered_is_refused(data: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        RDMABuffer(data)


def test_read_only_memory_can_be_registered_for_reading() -> None:
    buffer = RDMABuffer(b"constant", writable=False)
    into = bytearray(8)
    buffer.read_into(into).get()
    assert into == b"constant"
    assert not buffer.writable


def test_the_buffer_keeps_its_memory() -> None:
    array = np.arange(1000)
    watched = weakref.ref(array)
    buffer = RDMABuffer(array)
    del array
    gc.collect()
    assert watched() is not None
    buffer.drop()
    assert watched() is None


def test_a_registered_bytearray_cannot_be_resized() -> None:
    data = bytearray(10)
    buffer = RDMABuffer(data)
    with pytest.raises(BufferError):
        data.append(1)
    buffer.drop()
    data.append(1)


def test_copies_at_home_reach_the_same_memory() -> None:
    array = np.arange(10, dtype=np.uint8)
    buffer = RDMABuffer(array)
    for other in (pickle.loads(pickle.dumps(buffer)), copy.copy(buffer), copy.deepcopy(buffer), buffer.at(0, 10)):
        assert other.backend == "local"
        other.write_from(bytes(10)).get()
        assert not array.any()
        array[:] = 1


def test_drop_is_idempotent_and_holds_for_every_copy() -> None:
    buffer = RDMABuffer(bytearray(10))
    copied = pickle.loads(pickle.dumps(buffer))
    part = buffer.at(2, 3)
    copied.drop()
    buffer.drop()
    copied.drop()
    for stale in (buffer, copied, part):
        with pytest.raises(BufferDroppedError):
            stale.read_into(bytearray(stale.nbytes)).get()
    with pytest.raises(BufferDroppedError):
        buffer.serialize()


def test_a_dropped_handle_does_not_drop_its_successor() -> None:
    first = RDMABuffer(bytearray(10))
    stale = pickle.loads(pickle.dumps(first))
    first.drop()
    buffers = [RDMABuffer(bytearray(10)) for _ in range(5)]
    stale.drop()
    for buffer in buffers:
        buffer.read_into(bytearray(10)).get()


def test_overlapping_copies_at_home_are_refused() -> None:
    array = np.zeros(100, np.uint8)
    buffer = RDMABuffer(array)
    with pytest.raises(ValueError, match="overlap"):
        buffer.read_into(array)
    with pytest.raises(ValueError, match="overlap"):
        buffer.at(0, 60).write_from(array[40:])
    buffer.at(0, 50).write_from(array[50:]).get()


def test_it_says_what_it_is() -> None:
    assert "10 bytes" in repr(RDMABuffer(bytearray(10)))


def test_short_copies_do_not_wait_for_a_thread_that_computes() -> None:
    buffer, into = RDMABuffer(np.arange(8)), np.zeros(8, np.int64)
    action = RDMAAction().read_remote(into, buffer)
    buffer.read_into(into).get()
    action.submit().get()
    gate, over = threading.Lock(), threading.Event()
    rounds = 0

    def compute() -> None:
        nonlocal rounds
        with gate:
            while not over.is_set():
                rounds += 1

    gate.acquire()
    thread = threading.Thread(target=compute)
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(5)  # who lets go of the GIL gets it back after so many seconds
    try:
        gate.release()
        for _ in range(2000):
            buffer.read_into(into).get()
            buffer.write_from(into).get()
            action.submit().get()
            if rounds:
                break
        rounds_meanwhile = rounds
    finally:
        over.set()
        sys.setswitchinterval(interval)
        thread.join()
    assert rounds_meanwhile == 0


async def test_a_drop_may_be_awaited_and_has_happened_when_it_returns() -> None:
    buffer = RDMABuffer(np.zeros(8, np.uint8))
    dropped = buffer.drop()
    with pytest.raises(BufferDroppedError):
        await buffer.read_into(bytearray(8))
    assert await dropped is None
    assert buffer.drop().get(1) is None
    await buffer.drop()
