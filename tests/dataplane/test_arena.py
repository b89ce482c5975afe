"""Memory that peers can map: given out once at a time, given back, used again."""

import gc
import itertools
import os
import random
import threading

import numpy as np
import pytest

from skipper import dataplane
from skipper.dataplane import process
from skipper.dataplane._copy import Block
from skipper.dataplane.arena import Arena
from skipper.dataplane.identity import new_owner


def fresh() -> Arena:
    return Arena(new_owner())


def test_blocks_never_share_a_byte() -> None:
    arena = fresh()
    generator = random.Random(1)
    live: dict[int, Block] = {}
    for step in range(600):
        if live and generator.random() < 0.45:
            del live[generator.choice(list(live))]
        live[step] = arena.allocate(generator.choice([1, 63, 64, 65, 4096, 70_000, 1 << 20]) + generator.randrange(50))
        spans = sorted((block.address, block.address + block.nbytes) for block in live.values())
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        assert all(block.address % 64 == 0 for block in live.values())


def test_a_block_is_found_by_its_address_and_others_are_not() -> None:
    arena = fresh()
    small, large = arena.allocate(100), arena.allocate(65 << 20)
    for block in (small, large):
        found = arena.locate(block.address, block.nbytes)
        assert found is not None
        assert found[0].address + found[1] == block.address
        assert found[0] is block.owner
    outside = np.zeros(100, np.uint8)
    assert arena.locate(outside.__array_interface__["data"][0], 100) is None
    assert arena.locate(large.address, 1 << 40) is None
    assert arena.locate(1, 1) is None


def test_large_memory_is_used_again_while_it_is_warm() -> None:
    arena = fresh()
    block = arena.allocate(65 << 20)
    address = block.address
    del block
    again = arena.allocate(64 << 20)
    assert again.address == address
    assert arena.allocate(64 << 20).address != address


def test_thousands_of_blocks_cost_a_handful_of_descriptors() -> None:
    before = len(os.listdir("/proc/self/fd"))
    arena = fresh()
    blocks = [arena.allocate(40_000) for _ in range(5000)]
    blocks += [arena.allocate(3 << 20) for _ in range(200)]
    assert len(os.listdir("/proc/self/fd")) - before <= 5
    del blocks


def test_more_than_is_kept_goes_back_to_the_system() -> None:
    before = len(os.listdir("/proc/self/fd"))
    arena = fresh()
    blocks = [arena.allocate(200 << 20) for _ in range(8)]
    del blocks
    assert len(os.listdir("/proc/self/fd")) - before <= 5


def test_a_view_keeps_the_block_and_the_last_one_gives_it_back() -> None:
    arena = process.current().arena
    array = dataplane.empty_array(65 << 20, np.uint8)
    address = array.__array_interface__["data"][0]
    view = array[1000:2000].view(np.int64)
    del array
    gc.collect()
    assert dataplane.is_shared(view)
    other = dataplane.empty_array(65 << 20, np.uint8)
    assert other.__array_interface__["data"][0] != address
    del view
    assert arena.allocate(65 << 20).address == address


def test_threads_may_allocate_and_free_at_will() -> None:
    arena = fresh()
    wrong: list[int] = []

    def work(mark: int) -> None:
        for size in range(1, 300):
            array = np.frombuffer(memoryview(arena.allocate(size * 37)), np.uint8)
            array[:] = mark
            if not (array == mark).all():
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_memory_that_the_system_does_not_have_is_a_typed_error() -> None:
    with pytest.raises(dataplane.RegistrationError, match="bytes of shared memory"):
        fresh().allocate(1 << 60)
