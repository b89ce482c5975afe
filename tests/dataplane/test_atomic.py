"""Atomic operations: their arguments, their arithmetic, and that nothing is lost between processes."""

import asyncio
import multiprocessing
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from skipper import dataplane
from skipper.dataplane import BufferDroppedError, FetchOperation, Operation, RDMABuffer

TOP = (1 << 64) - 1
PROCESSES = 4
ADDITIONS = 5_000
LOCKED = 300
WAIT_S = 300.0  # for processes that import PyTorch, emulated ones too


def words(*values: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.array(values, dtype=np.uint64)


def test_fetch_add_gives_what_was_there_before() -> None:
    array = words(7, 40, 9)
    buffer = RDMABuffer(array)
    assert buffer.fetch_add(2, offset=8).get() == 40
    assert buffer.fetch_add(0, offset=8).get() == 42
    assert array.tolist() == [7, 42, 9]


def test_addition_is_modulo_two_to_the_64() -> None:
    array = words(3)
    buffer = RDMABuffer(array)
    assert buffer.fetch_add(-4).get() == 3
    assert buffer.fetch_add(1).get() == TOP
    assert buffer.fetch_add(TOP).get() == 0
    assert buffer.fetch_add(-(1 << 63)).get() == TOP
    assert array[0] == (1 << 63) - 1


def test_a_swap_takes_place_only_where_the_word_is_as_expected() -> None:
    array = words(5)
    buffer = RDMABuffer(array)
    assert buffer.compare_and_swap(4, 9).get() == 5
    assert array[0] == 5
    assert buffer.compare_and_swap(5, -1).get() == 5
    assert array[0] == TOP
    assert buffer.compare_and_swap(-1, 0).get() == TOP
    assert array[0] == 0


def test_a_part_counts_its_offset_from_its_own_start() -> None:
    array = words(0, 0, 0)
    RDMABuffer(array).at(8, 16).fetch_add(6, offset=8).get()
    assert array.tolist() == [0, 0, 6]


def test_the_result_can_be_awaited() -> None:
    buffer = RDMABuffer(words(11))

    async def main() -> tuple[int, int]:
        return await buffer.fetch_add(1), await buffer.compare_and_swap(12, 0)

    assert asyncio.run(main()) == (11, 12)


def test_an_operation_under_way_gives_its_result_to_every_kind_of_waiter() -> None:
    async def awaited(operation: FetchOperation) -> int:
        return await operation

    waiters: list[Callable[[FetchOperation], int]] = [
        lambda operation: operation.get(WAIT_S),
        lambda operation: asyncio.run(awaited(operation)),
    ]
    for wait in waiters:
        operation = FetchOperation()
        assert isinstance(operation, Operation)
        assert not operation.done()

        def finish(operation: FetchOperation = operation) -> None:
            operation.previous = 77
            operation.part_done(None)

        threading.Timer(0.05, finish).start()
        assert wait(operation) == 77


def test_numbers_of_numpy_are_numbers() -> None:
    array = words(1, 1)
    assert RDMABuffer(array).fetch_add(np.uint64(TOP), offset=np.int32(8)).get() == 1  # type: ignore[arg-type]
    assert array.tolist() == [1, 0]


@pytest.mark.parametrize("wrong", [True, 1.0, "1", None, np.float64(1)], ids=repr)
def test_what_is_no_integer_is_refused(wrong: Any) -> None:
    array = words(0, 0)
    buffer = RDMABuffer(array)
    with pytest.raises(TypeError, match="value"):
        buffer.fetch_add(wrong)
    with pytest.raises(TypeError, match="expected"):
        buffer.compare_and_swap(wrong, 1)
    with pytest.raises(TypeError, match="desired"):
        buffer.compare_and_swap(0, wrong)
    with pytest.raises(TypeError, match="offset"):
        buffer.fetch_add(1, offset=wrong)
    assert array.tolist() == [0, 0]


@pytest.mark.parametrize("wrong", [1 << 64, -(1 << 63) - 1])
def test_numbers_beyond_a_word_are_refused(wrong: int) -> None:
    buffer = RDMABuffer(words(0))
    with pytest.raises(ValueError, match="value"):
        buffer.fetch_add(wrong)
    with pytest.raises(ValueError, match="expected"):
        buffer.compare_and_swap(wrong, 1)
    with pytest.raises(ValueError, match="desired"):
        buffer.compare_and_swap(0, wrong)


@pytest.mark.parametrize("offset", [-8, 9, 16, 1 << 70])
def test_words_that_stick_out_are_refused(offset: int) -> None:
    with pytest.raises(ValueError, match="not a word within 16 bytes"):
        RDMABuffer(words(0, 0)).fetch_add(1, offset=offset)


def test_a_buffer_smaller_than_a_word_has_none() -> None:
    with pytest.raises(ValueError, match="not a word within 7 bytes"):
        RDMABuffer(bytearray(7)).fetch_add(1)


def test_alignment_is_that_of_the_address_not_of_the_offset() -> None:
    array = words(0, 0, 0)
    buffer = RDMABuffer(array)
    with pytest.raises(ValueError, match="multiple of 8"):
        buffer.fetch_add(1, offset=4)
    part = buffer.at(4, 20)
    with pytest.raises(ValueError, match="multiple of 8"):
        part.fetch_add(1)
    part.fetch_add(1, offset=4).get()
    assert array.tolist() == [0, 1, 0]


def test_read_only_buffers_and_bad_timeouts_are_refused() -> None:
    array = words(0)
    with pytest.raises(ValueError, match="read-only"):
        RDMABuffer(array, writable=False).fetch_add(1)
    buffer = RDMABuffer(array)
    with pytest.raises(ValueError, match="timeout"):
        buffer.fetch_add(1, timeout=0)
    with pytest.raises(TypeError, match="timeout"):
        buffer.compare_and_swap(0, 1, timeout="soon")  # type: ignore[arg-type]
    assert array[0] == 0


def test_a_dropped_buffer_has_no_words() -> None:
    array = words(0)
    buffer = RDMABuffer(array)
    part = buffer.at(0, 8)
    part.fetch_add(1).get()  # the way there is known from here on
    buffer.drop()
    for operation in (buffer.fetch_add(1), part.fetch_add(1), part.compare_and_swap(1, 2)):
        with pytest.raises(BufferDroppedError):
            operation.get()
    assert array[0] == 1


def test_threads_of_one_process_lose_nothing() -> None:
    array = words(0)
    buffer = RDMABuffer(array)
    seen: list[int] = []

    def work() -> None:
        seen.extend([buffer.fetch_add(1).get() for _ in range(2_000)])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert array[0] == 8_000
    assert sorted(seen) == list(range(8_000))


def _add(raw: bytes, connection: Connection) -> None:
    buffer = RDMABuffer.deserialize(raw)
    assert buffer.backend == "shm"
    connection.send("ready")
    connection.recv()
    connection.send([buffer.fetch_add(3, offset=8).get() for _ in range(ADDITIONS)])


def _count_under_a_lock(raw: bytes, connection: Connection) -> None:
    """What a lock is for: a read, a change and a write that nobody may come between."""
    buffer = RDMABuffer.deserialize(raw)
    lock, counter = buffer.at(0, 8), buffer.at(8, 8)
    mine = np.zeros(1, np.uint64)
    connection.send("ready")
    me = connection.recv()
    for _ in range(LOCKED):
        while lock.compare_and_swap(0, me).get() != 0:
            pass
        counter.read_into(mine).get()
        mine += 1
        counter.write_from(mine).get()
        assert lock.compare_and_swap(me, 0).get() == me
    connection.send("done")


def _race(work: Callable[[bytes, Connection], None], buffer: RDMABuffer) -> list[Any]:
    """Run `work` in several processes that begin together; what each of them had to say."""
    spawn = multiprocessing.get_context("spawn")
    ends, processes = [], []
    for _ in range(PROCESSES):
        here, there = spawn.Pipe()
        processes.append(spawn.Process(target=work, args=(buffer.serialize(), there), daemon=True))
        processes[-1].start()
        there.close()
        ends.append(here)
    try:
        assert [_receive(end) for end in ends] == ["ready"] * PROCESSES
        for number, end in enumerate(ends, start=1):
            end.send(number)
        return [_receive(end) for end in ends]
    finally:
        for end in ends:
            end.close()  # whoever still waits for a word ends here
        for process in processes:
            process.join(WAIT_S)
            process.close()


def _receive(end: Connection) -> Any:
    assert end.poll(WAIT_S)
    return end.recv()


def test_processes_that_add_to_one_shared_word_lose_nothing() -> None:
    array = dataplane.empty_array(3, np.uint64)
    array[:] = 0
    buffer = RDMABuffer(array)
    replies = _race(_add, buffer)
    total = 3 * PROCESSES * ADDITIONS
    assert array.tolist() == [0, total, 0]
    assert sorted(previous for reply in replies for previous in reply) == list(range(0, total, 3))


def test_compare_and_swap_makes_a_lock_between_processes() -> None:
    array = dataplane.empty_array(2, np.uint64)
    array[:] = 0
    buffer = RDMABuffer(array)
    assert _race(_count_under_a_lock, buffer) == ["done"] * PROCESSES
    assert array.tolist() == [0, PROCESSES * LOCKED]


def test_the_owner_and_its_readers_add_to_the_same_word() -> None:
    """The owner's own operations (local) and those of another process (shm) are both the CPU's."""
    array = dataplane.empty_array(2, np.uint64)
    array[:] = 0
    buffer = RDMABuffer(array)
    stop = threading.Event()
    mine: list[int] = []

    def add() -> None:
        while not stop.is_set():
            mine.append(buffer.fetch_add(3, offset=8).get())

    adding = threading.Thread(target=add)
    adding.start()
    try:
        replies = _race(_add, buffer)
    finally:
        stop.set()
        adding.join()
    seen = sorted(mine + [previous for reply in replies for previous in reply])
    assert seen == list(range(0, 3 * (PROCESSES * ADDITIONS + len(mine)), 3))
    assert array[1] == 3 * len(seen)


def test_an_owner_that_is_gone_is_a_typed_error() -> None:
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_own, args=(there,), daemon=True)
    process.start()
    buffer = RDMABuffer.deserialize(_receive(here))
    assert buffer.backend == "shm"
    assert buffer.fetch_add(1).get() == 5
    process.kill()
    process.join(WAIT_S)
    for operation in (buffer.fetch_add(1), buffer.compare_and_swap(6, 0)):
        with pytest.raises(dataplane.OwnerDiedError):
            operation.get()
    process.close()


def _own(connection: Connection) -> None:
    array = dataplane.empty_array(1, np.uint64)
    array[:] = 5
    buffer = RDMABuffer(array)
    connection.send(buffer.serialize())
    connection.recv()
    del buffer
