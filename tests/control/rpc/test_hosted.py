import threading
import time

import pytest

from skipper.control.rpc.hosted import BusyError, ConcurrencyLimit, LateError
from skipper.control.support.daemon_threads import DaemonThreads
from tests.control.conftest import wait_until
from tests.control.rpc.parties import PATIENCE_S


def test_those_who_wait_come_through_in_their_order() -> None:
    limit = ConcurrencyLimit(1, max_waiting=10)
    limit.enter(None)
    order: list[int] = []

    def pass_through(number: int) -> None:
        limit.enter(PATIENCE_S)
        order.append(number)
        limit.leave()

    threads = []
    for number in range(5):
        threads.append(threading.Thread(target=pass_through, args=(number,)))
        threads[-1].start()
        wait_until(lambda number=number: len(limit._waiting) == number + 1, "it waits")
    limit.leave()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert order == list(range(5))


def test_too_many_are_turned_away_and_who_is_late_takes_no_place() -> None:
    limit = ConcurrencyLimit(2, max_waiting=1)
    limit.enter(0)
    limit.enter(0)
    with pytest.raises(LateError):
        limit.enter(0.01)
    waiting = threading.Thread(target=limit.enter, args=(PATIENCE_S,))
    waiting.start()
    wait_until(lambda: len(limit._waiting) == 1, "it waits")
    with pytest.raises(BusyError):
        limit.enter(PATIENCE_S)
    limit.leave()
    waiting.join(PATIENCE_S)
    limit.leave()
    limit.enter(0)


def test_no_more_threads_are_made_than_are_needed_or_allowed() -> None:
    threads = DaemonThreads(3, name="test")
    for _ in range(20):
        threads.submit(lambda: None).result(PATIENCE_S)
        wait_until(lambda: threads._idle == 1, "the thread is idle again")
    assert threads._count == 1
    gate = threading.Event()
    running = [threads.submit(gate.wait, PATIENCE_S) for _ in range(10)]
    time.sleep(0)
    assert threads._count == 3
    gate.set()
    assert all(each.result(PATIENCE_S) for each in running)
    with pytest.raises(ZeroDivisionError):
        threads.submit(lambda: 1 / 0).result(PATIENCE_S)
    threads.shutdown()
    wait_until(lambda: threads._count == 0, "the threads end")
