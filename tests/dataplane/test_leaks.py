"""Thousands of buffers, actions and operations come and go, and nothing of them stays."""

import gc
import multiprocessing
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from skipper import dataplane
from skipper.dataplane import RDMAAction, RDMABuffer, process

ROUNDS = 2_000
WARM = 200
SLACK = ROUNDS // 4  # caches of the interpreter may grow; a leak grows in every round, or in every other
WAIT_S = 60.0


@dataclass(frozen=True)
class Held:
    """What this process holds of each thing that could leak."""

    descriptors: int
    mappings: int
    registrations: int
    objects: int

    @classmethod
    def now(cls) -> "Held":
        gc.collect()
        return cls(
            len(os.listdir("/proc/self/fd")),
            len(Path("/proc/self/maps").read_text().splitlines()),
            len(process.current().registrations),
            sys.getallocatedblocks(),
        )


def leaves_nothing(one_round: Callable[[int], None]) -> None:
    for number in range(WARM):
        one_round(number)
    before = Held.now()
    for number in range(ROUNDS):
        one_round(number)
    after = Held.now()
    assert after.descriptors <= before.descriptors
    assert after.registrations <= before.registrations
    assert after.mappings <= before.mappings + 2  # Python's own allocator maps now and then
    assert after.objects - before.objects < SLACK


def test_buffers_that_are_dropped() -> None:
    into = bytearray(1000)

    def one_round(number: int) -> None:
        buffer = RDMABuffer(np.zeros(1000, np.uint8))
        buffer.read_into(into).get()
        buffer.drop()

    leaves_nothing(one_round)


@pytest.mark.parametrize("nbytes", [100, 5000, 3 << 20])
def test_shared_buffers_whose_handles_have_left(nbytes: int) -> None:
    def one_round(number: int) -> None:
        array = dataplane.empty_array(nbytes, np.uint8)
        array[:8] = number % 256
        buffer = RDMABuffer(array)
        buffer.serialize()
        buffer.at(0, 8).fetch_add(1).get()
        if number % 2:
            buffer.drop()  # the others end with their memory

    leaves_nothing(one_round)


def test_actions_that_are_compiled_and_forgotten() -> None:
    source = np.arange(1000)
    into = np.zeros_like(source)
    buffer = RDMABuffer(source)

    def one_round(number: int) -> None:
        RDMAAction().read_remote(into, buffer).submit().get()

    leaves_nothing(one_round)


def test_failed_operations() -> None:
    into = bytearray(1000)

    def one_round(number: int) -> None:
        buffer = RDMABuffer(np.zeros(1000, np.uint8))
        part = buffer.at(0, 1000)
        buffer.drop()
        with pytest.raises(dataplane.BufferDroppedError):
            part.read_into(into).get()
        with pytest.raises(dataplane.BufferDroppedError):
            part.fetch_add(1).get()

    leaves_nothing(one_round)


def _own(connection: Connection) -> None:
    """A fresh buffer, small or large, for every word; the last one is dropped then."""
    buffer = None
    while (nbytes := connection.recv()) != 0:
        if buffer is not None:
            buffer.drop()
        array = dataplane.empty_array(nbytes, np.uint8)
        array[:100] = 7
        buffer = RDMABuffer(array)
        connection.send(buffer)


def test_buffers_of_another_process_that_are_read_once() -> None:
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    owner = spawn.Process(target=_own, args=(there,), daemon=True)
    owner.start()
    there.close()
    into = bytearray(100)

    def one_round(number: int) -> None:
        here.send(100 if number % 3 else 5 << 20)
        assert here.poll(WAIT_S)
        buffer = here.recv()
        assert buffer.backend == "shm"
        buffer.at(0, 100).read_into(into).get()
        assert into[0] == 7

    try:
        leaves_nothing(one_round)
        here.send(0)
    finally:
        here.close()
        owner.join(WAIT_S)
        owner.close()
