"""Nothing leaks: not descriptors, not memory, not on either side."""

import gc
from typing import Any

import numpy as np

from skipper.dataplane import RDMABuffer
from tests.conformance.conftest import Case
from tests.conformance.owner import footprint
from tests.conformance.test_transfers import handle_to, pattern
from tests.rdma_guest.gates import devices
from tests.rdma_guest.links import resources

Owner = Any
SLACK_KIB = 8 << 10


def objects_on_devices() -> int:
    """Queue pairs and memory regions of all processes, as the kernel counts them."""
    return sum(resources(kind) for kind in ("qp", "mr")) if devices() else 0


def test_thousands_of_buffers_registered_and_dropped_leave_nothing(owner: Owner) -> None:
    owner("churn", 500, 3000)
    descriptors, resident, threads = owner("footprint")
    mappings, on_devices = owner("mappings"), objects_on_devices()
    owner("churn", 5000, 3000)
    after_descriptors, after_resident, after_threads = owner("footprint")
    assert after_descriptors <= descriptors + 2
    assert after_resident < resident + SLACK_KIB
    assert after_threads <= threads
    assert owner("mappings") <= mappings + 5
    assert objects_on_devices() <= on_devices


def test_thousands_of_handles_read_leave_nothing(owner: Owner) -> None:
    into = bytearray(2000)

    def some(count: int) -> None:
        for _ in range(count):
            name, buffer = handle_to(owner, bytes(2000))
            buffer.read_into(into).get()
            owner("drop", name)
            owner("forget_memory", name)

    some(100)
    gc.collect()
    descriptors, resident = footprint()
    some(1000)
    gc.collect()
    after_descriptors, after_resident = footprint()
    assert after_descriptors <= descriptors + 2
    assert after_resident < resident + SLACK_KIB


def test_large_memory_comes_and_goes_on_both_sides(owner: Owner) -> None:
    nbytes = 24 << 20
    into = np.empty(nbytes, np.uint8)

    def once(value: int) -> None:
        name, raw = owner("make_filled", nbytes, value)
        buffer = RDMABuffer.deserialize(raw)
        buffer.read_into(into).get()
        assert (into == value).all()
        del buffer
        owner("forget", name)

    once(1)
    once(2)
    descriptors, _ = footprint()
    owner_descriptors, owner_resident, _ = owner("footprint")
    for value in range(3, 9):
        once(value)
    assert footprint()[0] <= descriptors + 2
    after_descriptors, after_resident, _ = owner("footprint")
    assert after_descriptors <= owner_descriptors + 2
    assert after_resident < owner_resident + SLACK_KIB + 2 * (nbytes >> 10)


def test_owners_that_come_and_go_leave_nothing(remote_case: Case, start: Any) -> None:
    into = bytearray(100)

    def one() -> None:
        other = start()
        _, buffer = handle_to(other, pattern(100))
        buffer.read_into(into).get()
        other.close()

    one()
    gc.collect()
    descriptors, _ = footprint()
    one()
    one()
    gc.collect()
    # What the last one has cost is given back with the next connection.
    assert footprint()[0] <= descriptors + 1
