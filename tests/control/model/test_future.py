import asyncio
import threading
import time

import pytest

from skipper.control import DeadlineError, Future
from skipper.control.model.future import Promise


def settle_later(future: Promise[int], value: int) -> threading.Thread:
    thread = threading.Thread(target=lambda: future.settle_by(lambda: value))
    thread.start()
    return thread


def test_get_waits_for_the_value_and_may_be_repeated() -> None:
    future: Promise[int] = Promise()
    assert not future.done()
    thread = settle_later(future, 5)
    assert future.get(10) == 5
    assert future.get() == 5
    assert future.done()
    thread.join()


def test_who_prints_a_future_reads_how_to_get_its_result() -> None:
    promise: Promise[int] = Promise()
    assert repr(promise) == "<Future, not ended yet: get() or await gives its result>"
    promise.set_exception(ValueError("no"))
    assert str(promise) == "<Future, has ended: get() or await gives its result>"


def test_get_raises_a_timeout_error_and_the_value_can_still_come() -> None:
    future: Promise[int] = Promise()
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"0.05 s") as caught:
        future.get(0.05)
    assert isinstance(caught.value, DeadlineError)
    assert time.monotonic() - began >= 0.05
    with pytest.raises(DeadlineError):
        future.get(0)
    settle_later(future, 6).join()
    assert future.get(0) == 6


async def test_await_works_in_any_loop_and_together_with_get() -> None:
    future: Promise[int] = Promise()
    waiters = [asyncio.ensure_future(wait(future)) for _ in range(3)]
    await asyncio.sleep(0)
    settle_later(future, 7).join()
    assert await asyncio.gather(*waiters) == [7, 7, 7]
    assert await future == future.get(0) == 7


async def wait(future: Future[int]) -> int:
    return await future


async def test_a_cancelled_wait_leaves_the_future_alone() -> None:
    future: Promise[int] = Promise()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(wait(future), 0.01)
    settle_later(future, 8).join()
    assert await future == 8


def test_an_error_is_raised_to_everyone_who_asks() -> None:
    future: Promise[int] = Promise()

    def fail() -> int:
        raise KeyError("gone")

    future.settle_by(fail)
    for _ in range(2):
        with pytest.raises(KeyError, match="gone"):
            future.get()


def test_the_first_end_counts_and_callbacks_run_once() -> None:
    future: Promise[int] = Promise()
    seen: list[int] = []
    future.add_done_callback(lambda settled: seen.append(settled.get(0)))
    future.settle_by(lambda: 1)
    future.settle_by(lambda: 2)
    future.add_done_callback(lambda settled: seen.append(settled.get(0)))
    assert seen == [1, 1]
    assert Future.of(3).get(0) == 3


def test_a_callback_that_raises_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    future: Promise[int] = Promise()
    seen: list[int] = []
    future.add_done_callback(lambda _: 1 / 0)
    future.add_done_callback(lambda settled: seen.append(settled.get(0)))
    future.settle_by(lambda: 1)
    assert seen == [1]
    assert "ZeroDivisionError" in caplog.text


def test_many_threads_wait_for_one_future() -> None:
    future: Promise[int] = Promise()
    results: list[int] = []
    threads = [threading.Thread(target=lambda: results.append(future.get(10))) for _ in range(8)]
    for thread in threads:
        thread.start()
    future.settle_by(lambda: 9)
    for thread in threads:
        thread.join()
    assert results == [9] * 8


async def test_it_answers_to_the_names_of_pythons_own_futures() -> None:
    future: Promise[int] = Promise()
    asked = future.as_asyncio()
    cancelled = future.as_asyncio()
    cancelled.cancel()
    with pytest.raises(DeadlineError):
        future.exception(0.01)
    thread = settle_later(future, 7)
    assert await asyncio.wait_for(asked, 10) == 7
    thread.join()
    assert (future.result(), future.exception()) == (7, None)


def test_exception_waits_and_gives_the_error() -> None:
    error = ValueError("told to")
    future: Promise[int] = Promise()

    def fail() -> int:
        raise error

    future.settle_by(fail)
    assert future.exception(1) is error
    with pytest.raises(ValueError, match="told to"):
        future.result(1)
    with pytest.raises(RuntimeError):
        future.as_asyncio()
