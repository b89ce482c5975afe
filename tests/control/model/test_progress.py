"""Progress as programs follow it: what is told, on which thread, and what a callback that raises costs."""

import logging
import os
import threading
from collections.abc import Callable, Iterator

import pytest

from skipper.control import Progress, ProgressSubscription, on_progress, track_progress
from skipper.control.model import progress, progress_feed
from tests.control.conftest import PATIENCE_S, wait_until


class Told(list[Progress]):
    """What a callback was called with."""

    def states(self, description: str) -> list[str]:
        return [each.state for each in self if each.description == description]

    def wait_for(self, condition: Callable[[Progress], bool]) -> Progress:
        wait_until(lambda: any(map(condition, list(self))), "a call of the callback")
        return next(filter(condition, self))


@pytest.fixture
def told() -> Iterator[Told]:
    told = Told()
    with on_progress(told.append):
        yield told


def test_a_task_is_told_of_while_it_goes_on_and_when_it_has_ended(told: Told) -> None:
    with track_progress("copy", 200, "bytes") as task:
        assert told.wait_for(lambda each: each.completed == 0).state == "running"
        task.advance(50)
        half = told.wait_for(lambda each: each.completed == 50)
        assert (half.description, half.total, half.unit, half.process) == ("copy", 200, "bytes", "")
        assert half.rate == pytest.approx(50 / half.elapsed_s)
        assert half.remaining_s == pytest.approx(3 * half.elapsed_s)
        task.advance(150)
    last = told.wait_for(lambda each: each.state != "running")
    assert (last.state, last.completed, last.remaining_s) == ("finished", 200, 0)
    assert told.states("copy").count("finished") == 1


def test_a_task_that_raises_has_failed(told: Told) -> None:
    with pytest.raises(KeyError), track_progress("fail"):
        raise KeyError
    assert told.wait_for(lambda each: each.description == "fail" and each.state != "running").state == "failed"


def test_who_is_waited_for_is_named(told: Told) -> None:
    names = [f"host {number}" for number in range(40)]
    with track_progress("attach", len(names), "hosts", names=names) as task:
        task.advance(name="host 0")
        seen = told.wait_for(lambda each: each.completed == 1)
    assert seen.waiting_for == tuple(names[1:17])
    assert (seen.total, seen.completed) == (40, 1)


def test_what_has_ended_is_told_before_the_subscription_closes() -> None:
    told = Told()
    with on_progress(told.append):
        track_progress("short").end()
    assert told.states("short")[-1] == "finished"
    count = len(told)
    track_progress("later").end()
    assert len(told) == count


def test_callbacks_run_one_at_a_time_on_a_thread_of_their_own(told: Told) -> None:
    running, most, threads = [0], [0], set()

    def slow(_: Progress) -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        threads.add(threading.current_thread().name)
        threading.Event().wait(0.01)
        running[0] -= 1

    with on_progress(slow), on_progress(slow):
        for _ in range(5):
            with track_progress("work"):
                told.wait_for(lambda each: each.state == "running")
        wait_until(lambda: told.states("work").count("finished") == 5, "the ends")
        wait_until(lambda: not running[0], "the callbacks")
    assert most == [1]
    assert "control-progress" in threads
    assert threading.current_thread().name not in threads - {"MainThread"}


def test_a_callback_that_raises_is_logged_and_not_called_again(told: Told, caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def broken(each: Progress) -> None:
        calls.append(each)
        raise RuntimeError("cannot draw")

    with caplog.at_level(logging.ERROR, "skipper.control"), on_progress(broken):
        with track_progress("one") as task:
            wait_until(lambda: bool(calls), "the first call")
            task.advance()
            told.wait_for(lambda each: each.completed == 1)  # the others go on
        told.wait_for(lambda each: each.state == "finished")
    assert len(calls) == 1
    assert "cannot draw" in caplog.text


def test_a_callback_may_close_its_own_subscription() -> None:
    calls: list[Progress] = []
    subscription: list[ProgressSubscription] = []

    def once(each: Progress) -> None:
        calls.append(each)
        subscription[0].close()

    subscription.append(on_progress(once))
    with track_progress("one"):
        wait_until(lambda: bool(calls), "the call")
    subscription[0].close()
    assert len(calls) == 1


def test_nothing_is_begun_while_nobody_follows(told: Told) -> None:
    assert progress.begin("watched", 1, "steps") is not None
    followers, progress._feed.followers = progress._feed.followers, ()
    try:
        assert progress.begin("alone", 1, "steps") is None
    finally:
        progress._feed.followers = followers


def test_a_task_of_another_process_of_which_nothing_comes_any_more_has_failed(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_feed, "SILENCE_S", 0.2)
    progress.take(Progress(7, "trainers", "get policy", 1, 2, "bytes", 1.0))
    assert told.wait_for(lambda each: each.process == "trainers" and each.state == "failed").completed == 1


def test_a_forked_copy_tells_nobody_and_does_not_hang(told: Told) -> None:
    with track_progress("parent") as task:
        told.wait_for(lambda each: each.description == "parent")
        pid = os.fork()
        if not pid:  # the copy
            with track_progress("child"):
                task.advance()
            os._exit(0 if not progress.is_followed() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    told.wait_for(lambda each: each.state == "finished")
    assert "child" not in {each.description for each in told}


def test_a_callback_has_to_be_callable() -> None:
    with pytest.raises(TypeError, match="takes a function"):
        on_progress("print")  # type: ignore[arg-type]


def test_closing_waits_for_a_call_that_runs() -> None:
    entered, leave, left = threading.Event(), threading.Event(), threading.Event()

    def slow(_: Progress) -> None:
        entered.set()
        leave.wait(PATIENCE_S)
        left.set()

    subscription = on_progress(slow)
    with track_progress("work"):
        assert entered.wait(PATIENCE_S)
        closer = threading.Thread(target=subscription.close)
        closer.start()
        leave.set()
        closer.join(PATIENCE_S)
        assert left.is_set()
        assert not closer.is_alive()
