"""The mutex of the verbs backend, and how often its daemon thread looks: what both promise without any device."""

import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

import pytest

from skipper.dataplane.backends.verbs.engine import PollInterval
from skipper.dataplane.backends.verbs.lock import Mutex

PATIENCE_S = 10.0


def condition_of(mutex: Mutex) -> threading.Condition:
    lock: Any = mutex
    return threading.Condition(lock)


def test_one_thread_at_a_time_holds_the_mutex_and_may_take_it_again() -> None:
    mutex, held, most = Mutex(), 0, 0

    def take(times: int) -> None:
        nonlocal held, most
        for _ in range(times):
            with mutex, mutex:
                held += 1
                most = max(most, held)
                time.sleep(0)  # lets another thread run, if one can
                held -= 1

    threads = [threading.Thread(target=take, args=(200,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert (held, most) == (0, 1)
    assert not mutex.locked()
    assert mutex.acquire(blocking=False)
    assert mutex.locked()
    mutex.release()


def test_who_finds_the_mutex_taken_may_refuse_to_wait() -> None:
    mutex, answers = Mutex(), list[bool]()
    with mutex:
        thread = threading.Thread(target=lambda: answers.append(mutex.acquire(blocking=False)))
        thread.start()
        thread.join(PATIENCE_S)
    assert answers == [False]


def test_who_refuses_to_wait_does_not_wait_for_one_that_is_about_to_hold_the_mutex_either() -> None:
    mutex, taken = Mutex(), [0, 0]

    def take(which: int, *, blocking: bool) -> None:
        for _ in range(2000):
            if mutex.acquire(blocking):
                taken[which] += 1
                mutex.release()

    threads = [threading.Thread(target=take, args=(0,), kwargs={"blocking": True}) for _ in range(3)]
    threads.append(threading.Thread(target=take, args=(1,), kwargs={"blocking": False}))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads change wherever they can
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
    finally:
        sys.setswitchinterval(interval)
    assert taken[0] == 3 * 2000
    assert taken[1] <= 2000
    assert mutex.acquire(blocking=False)
    mutex.release()


def test_only_the_holder_gives_the_mutex_back() -> None:
    mutex = Mutex()
    with pytest.raises(RuntimeError, match="does not hold"):
        mutex.release()


def test_a_condition_lets_go_of_the_mutex_however_often_it_was_taken() -> None:
    mutex = Mutex()
    changed, state = condition_of(mutex), list[str]()

    def wait() -> None:
        with mutex, changed:
            state.append("waiting")
            assert changed.wait_for(lambda: "changed" in state, PATIENCE_S)
            state.append("seen")

    thread = threading.Thread(target=wait)
    thread.start()
    with mutex:
        while "waiting" not in state:
            changed.wait(0.001)
        state.append("changed")
        changed.notify_all()
    thread.join(PATIENCE_S)
    assert state == ["waiting", "changed", "seen"]
    with pytest.raises(RuntimeError):
        changed.notify()


@dataclass
class Begun:
    """As much of a run as the interval looks at."""

    timeout: float
    attended: bool = True


class Looker:
    """A thread that looks again and again."""

    def __init__(self) -> None:
        self.mutex = Mutex()
        self.interval = PollInterval(self.mutex)
        self.idle = self.stopped = False
        self.looks = 0
        self._looked = condition_of(self.mutex)
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def looks_again(self, within_s: float) -> bool:
        with self.mutex:
            before = self.looks
            return self._looked.wait_for(lambda: self.looks > before, within_s)

    def stop(self) -> None:
        with self.mutex:
            self.stopped = True
            self.interval.call()
        self._thread.join(PATIENCE_S)

    def _look(self) -> None:
        with self.mutex:
            while not self.stopped:
                self.looks += 1
                self._looked.notify_all()
                self.interval.rest(float("inf"), idle=self.idle)


def test_the_thread_goes_on_looking_while_runs_are_under_way_and_rests_when_none_is() -> None:
    looker = Looker()
    for _ in range(8):
        assert looker.looks_again(PATIENCE_S)
    looker.idle = True
    while looker.looks_again(0.5):
        pass
    begun: Any = Begun(timeout=60)
    with looker.mutex:
        looker.interval.begun(begun)
    assert looker.looks_again(PATIENCE_S)
    looker.stop()


@pytest.mark.parametrize("begun", [Begun(timeout=0.001), Begun(timeout=60, attended=False)])
def test_a_run_that_cannot_wait_for_the_next_look_has_the_thread_look_at_once(begun: Any) -> None:
    looker = Looker()
    while looker.interval.seconds < 0.08:
        assert looker.looks_again(PATIENCE_S)
    with looker.mutex:
        looker.interval.begun(begun)
        assert looker.interval.seconds == 0.01
    assert looker.looks_again(PATIENCE_S)
    looker.stop()
