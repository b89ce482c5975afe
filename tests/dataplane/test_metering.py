"""`dataplane.traffic`: transfers are counted when they end, by direction, and failures by themselves."""

import threading

import numpy as np
import pytest

from skipper import dataplane
from skipper.dataplane import BufferDroppedError, Operation, RDMAAction, RDMABuffer, Traffic
from skipper.dataplane.metering import Meter


def difference(before: Traffic) -> tuple[int, int, int, int, int]:
    now = dataplane.traffic()
    return (
        now.in_flight - before.in_flight,
        now.done - before.done,
        now.failed - before.failed,
        now.read_nbytes - before.read_nbytes,
        now.written_nbytes - before.written_nbytes,
    )


def test_reads_and_writes_are_counted_with_their_bytes() -> None:
    buffer, here = RDMABuffer(np.zeros(100, np.uint8)), np.zeros(100, np.uint8)
    before = dataplane.traffic()
    buffer.read_into(here).get()
    buffer.at(0, 30).write_from(here[:30]).get()
    assert difference(before) == (0, 2, 0, 100, 30)


def test_an_action_counts_as_one_transfer_each_time_it_is_submitted() -> None:
    buffer, here = RDMABuffer(np.zeros(100, np.uint8)), np.zeros(100, np.uint8)
    action = RDMAAction().read_remote(here[:60], buffer.at(0, 60)).write_remote(buffer.at(60, 40), here[60:])
    before = dataplane.traffic()
    for _ in range(2):
        action.submit().get()
    assert difference(before) == (0, 2, 0, 120, 80)


def test_a_transfer_that_fails_moves_nothing() -> None:
    buffer = RDMABuffer(np.zeros(100, np.uint8))
    part = buffer.at(0, 50)
    part.read_into(np.zeros(50, np.uint8)).get()  # finds the way, which is then out of date
    before = dataplane.traffic()
    buffer.drop()
    with pytest.raises(BufferDroppedError):
        part.read_into(np.zeros(50, np.uint8)).get()
    assert difference(before)[2:] == (1, 0, 0)


def test_what_is_under_way_is_in_flight_until_it_ends() -> None:
    meter, under_way, doomed = Meter(), Operation(1), Operation(1)
    meter.follow(under_way, 10, 0)
    meter.follow(doomed, 0, 20)
    assert meter.read() == Traffic(2, 0, 0, 0, 0)
    under_way.part_done(None)
    doomed.part_done(BufferDroppedError("gone"))
    assert meter.read() == Traffic(0, 1, 1, 10, 0)


def test_no_count_is_lost_between_threads() -> None:
    buffer, before = RDMABuffer(np.zeros(8, np.uint8)), dataplane.traffic()

    def read() -> None:
        here = np.zeros(8, np.uint8)
        for _ in range(500):
            buffer.read_into(here).get()

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert difference(before) == (0, 2000, 0, 16000, 0)
