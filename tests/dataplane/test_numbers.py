"""Numbers that nobody means, handed to everything that takes one."""

from typing import Any

import numpy as np
import pytest

from skipper import dataplane
from skipper.dataplane import RDMAAction, RDMABuffer, RemoteLayout, empty_array
from tests.numbers import HUGE, NOT_NUMBERS, STRANGE, Call, refused_well

TOO_LARGE_TO_ALLOCATE = [value for value in STRANGE if value not in (2**31, 2**32)]


@pytest.fixture(scope="module")
def buffer() -> RDMABuffer:
    return RDMABuffer(empty_array(64, np.uint8))


def read(buffer: RDMABuffer, shape: int = 1, **options: Any) -> object:
    return RDMAAction().read_remote(np.zeros(shape, np.uint8), buffer, **options).submit().get(20)


CALLS: dict[str, Any] = {
    "at, offset": lambda buffer, value: buffer.at(value, 1),
    "at, nbytes": lambda buffer, value: buffer.at(0, value),
    "compare_and_swap, expected": lambda buffer, value: buffer.compare_and_swap(value, 0).get(20),
    "compare_and_swap, desired": lambda buffer, value: buffer.compare_and_swap(1, value).get(20),
    "compare_and_swap, offset": lambda buffer, value: buffer.compare_and_swap(0, 0, offset=value).get(20),
    "compare_and_swap, timeout": lambda buffer, value: buffer.compare_and_swap(0, 0, timeout=value).get(20),
    "fetch_add": lambda buffer, value: buffer.fetch_add(value).get(20),
    "read_into, timeout": lambda buffer, value: buffer.read_into(np.zeros(64, np.uint8), timeout=value).get(20),
    "write_from, timeout": lambda buffer, value: buffer.write_from(np.zeros(64, np.uint8), timeout=value).get(20),
    "get, timeout": lambda buffer, value: buffer.read_into(np.zeros(64, np.uint8)).get(value),
    "submit, timeout": lambda buffer, value: (
        RDMAAction().read_remote(np.zeros(64, np.uint8), buffer).submit(value).get(20)
    ),
    "at of an action": lambda buffer, value: read(buffer, at=(value,), layout=RemoteLayout(0, (1,), (1,), 1)),
    "layout, offset": lambda buffer, value: read(buffer, layout=RemoteLayout(value, (1,), (1,), 1)),
    "layout, shape": lambda buffer, value: read(buffer, layout=RemoteLayout(0, (value,), (1,), 1)),
    "layout, strides": lambda buffer, value: read(buffer, 2, layout=RemoteLayout(0, (2,), (value,), 1)),
    "layout, itemsize": lambda buffer, value: read(buffer, layout=RemoteLayout(0, (1,), (1,), value)),
    "memcpy, threads": lambda buffer, value: dataplane.memcpy(
        np.zeros(64, np.uint8), np.zeros(64, np.uint8), threads=value
    ),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("value", STRANGE, ids=lambda value: repr(value)[:12])
def test_strange_numbers_are_refused_in_words(buffer: RDMABuffer, name: str, value: Any) -> None:
    refused_well(lambda value: CALLS[name](buffer, value), value, dataplane.DataplaneError)


@pytest.mark.parametrize("value", TOO_LARGE_TO_ALLOCATE, ids=lambda value: repr(value)[:12])
def test_memory_of_a_strange_size_is_refused_in_words(value: Any) -> None:
    calls: tuple[Call, ...] = (
        lambda value: empty_array(value, np.uint8),
        lambda value: empty_array((2, value), np.uint8),
        lambda value: dataplane.empty(value),
        lambda value: dataplane.empty((value, value)),
    )
    for call in calls:
        refused_well(call, value, dataplane.DataplaneError)


def test_a_box_at_no_number_is_no_box(buffer: RDMABuffer) -> None:
    for value in (*HUGE, NOT_NUMBERS[0]):
        for layout in (RemoteLayout(value, (1,), (1,), 1), RemoteLayout(0, (2,), (value,), 1)):
            with pytest.raises((ValueError, TypeError)):
                RDMAAction().read_remote(np.zeros(layout.shape, np.uint8), buffer, layout=layout)
