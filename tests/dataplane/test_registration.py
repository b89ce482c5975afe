"""How long a registration lasts once its handle has left the process."""

import gc
import mmap
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from skipper import dataplane
from skipper.dataplane import BufferDroppedError, RDMABuffer, process
from tests.handles import parsed


def handle_of(data: object) -> RDMABuffer:
    """What a peer would get of a buffer that nobody here keeps; a handle that came home behaves the same."""
    handle: RDMABuffer = pickle.loads(pickle.dumps(RDMABuffer(data)))
    gc.collect()
    return handle


@pytest.mark.parametrize(
    "data",
    [
        np.arange(8.0),
        dataplane.empty_array(8, np.float64),
        torch.arange(8.0).double(),
        dataplane.empty(8, torch.float64),
    ],
    ids=["array", "shared array", "tensor", "shared tensor"],
)
def test_a_handle_outlives_the_object_that_made_it(data: object) -> None:
    np.asarray(data)[:] = np.arange(8.0)
    into = np.zeros(8)
    handle_of(data).read_into(into).get()
    assert into.tolist() == list(range(8))


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.arange(8.0),
        lambda: dataplane.empty_array(8, np.float64),
        lambda: torch.arange(8.0).double(),
        lambda: dataplane.empty(8, torch.float64),
    ],
    ids=["array", "shared array", "tensor", "shared tensor"],
)
def test_a_handle_does_not_keep_the_memory_and_is_stale_without_it(make: object) -> None:
    data = make()  # type: ignore[operator]
    handle = handle_of(data)
    gone = weakref.ref(data)
    del data
    gc.collect()
    assert gone() is None
    with pytest.raises(BufferDroppedError):
        handle.read_into(np.zeros(8)).get()


def is_mapped(address: int) -> bool:
    with open("/proc/self/maps", encoding="ascii") as file:
        ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in file]
    return any(begin <= address < end for begin, end in ranges)


@pytest.mark.parametrize(
    "make",
    [
        lambda nbytes: np.empty(nbytes, np.uint8),
        lambda nbytes: np.frombuffer(mmap.mmap(-1, nbytes), np.uint8),
        lambda nbytes: torch.empty(nbytes, dtype=torch.uint8),
    ],
    ids=["array", "array over a mapping", "tensor"],
)
def test_the_memory_is_still_there_when_its_registration_ends(make: Callable[[int], Any]) -> None:
    data = make(1 << 30)  # so large that it comes from the system, whatever the heap has free, and goes back at once
    buffer = RDMABuffer(data)
    address = parsed(buffer.serialize())[0].base
    registrations = process.current().registrations
    registration = registrations.of(parsed(buffer.serialize())[0])
    assert registration is not None
    there: list[bool] = []
    registrations.at_end(registration, lambda: there.append(is_mapped(address)))
    del buffer, registration
    assert there == []
    del data
    assert there == [True]
    assert not is_mapped(address)


def test_a_buffer_that_never_left_ends_with_its_object() -> None:
    data = np.arange(8.0)
    before = len(process.current().registrations)
    RDMABuffer(data)
    gc.collect()
    assert len(process.current().registrations) == before


def test_handing_out_the_same_memory_again_and_again_takes_no_more_room() -> None:
    data = dataplane.empty_array(8, np.float64)
    first = RDMABuffer(data).serialize()
    before = len(process.current().registrations)
    for _ in range(100):
        assert RDMABuffer(data).serialize() == first
    assert len(process.current().registrations) == before


def test_two_live_buffers_of_the_same_memory_are_dropped_one_by_one() -> None:
    data = np.arange(8.0)
    one, other = RDMABuffer(data), RDMABuffer(data)
    first, second = pickle.loads(pickle.dumps(one)), pickle.loads(pickle.dumps(other))
    one.drop()
    with pytest.raises(BufferDroppedError):
        first.read_into(np.zeros(8)).get()
    second.read_into(np.zeros(8)).get()


def test_a_handle_that_came_home_can_drop_what_nobody_holds() -> None:
    data = np.arange(8.0)
    handle = handle_of(data)
    handle.drop()
    with pytest.raises(BufferDroppedError):
        handle.read_into(np.zeros(8)).get()


def test_memory_that_nothing_tells_the_end_of_is_kept_until_drop() -> None:
    handle = handle_of(bytearray(b"eight by"))
    into = bytearray(8)
    handle.read_into(into).get()
    assert into == b"eight by"
    handle.drop()
    with pytest.raises(BufferDroppedError):
        handle.read_into(into).get()


def test_memory_given_to_another_owner_does_not_answer_to_the_old_handle() -> None:
    data = dataplane.empty_array(8, np.float64)
    handle = handle_of(data)
    del data
    gc.collect()
    again = dataplane.empty_array(8, np.float64)  # the arena gives the same bytes out again
    again[:] = 7
    with pytest.raises(BufferDroppedError):
        handle.read_into(np.zeros(8)).get()
