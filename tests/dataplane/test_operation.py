"""Operations end once, for everybody who waits."""

import asyncio
import threading
import time

import pytest

from skipper.dataplane import TransferTimeoutError
from skipper.dataplane.operation import DONE, Operation


def test_it_is_done_when_its_last_part_is() -> None:
    operation = Operation(2)
    operation.part_done(None)
    assert not operation.done()
    operation.part_done(None)
    assert operation.done()
    operation.get()


def test_the_first_error_is_the_one_that_is_raised_after_all_parts_have_ended() -> None:
    operation = Operation(3)
    operation.part_done(OSError("first"))
    operation.part_done(OSError("second"))
    assert not operation.done()
    operation.part_done(None)
    for _ in range(2):
        with pytest.raises(OSError, match="first"):
            operation.get()


def test_waiting_helps_before_it_sleeps() -> None:
    operation = Operation(1)
    operation.add_helper(lambda: operation.part_done(None))
    operation.get()


def test_a_helper_with_more_to_do_is_called_until_the_end() -> None:
    operation, calls = Operation(1), list[int]()

    def help_a_little() -> bool:
        calls.append(1)
        if len(calls) == 3:
            operation.part_done(None)
        return len(calls) < 3

    operation.add_helper(help_a_little)
    operation.get()
    assert len(calls) == 3


def test_a_helper_that_always_has_more_to_do_does_not_outlast_the_wait() -> None:
    operation = Operation(1)
    operation.add_helper(lambda: True)
    with pytest.raises(TransferTimeoutError, match="goes on"):
        operation.get(timeout=0.01)


def test_a_wait_that_is_too_short_leaves_the_operation_running() -> None:
    operation = Operation(1)
    with pytest.raises(TransferTimeoutError, match="goes on"):
        operation.get(timeout=0.01)
    operation.part_done(None)
    operation.get(timeout=0.01)


def test_a_callback_that_raises_is_logged_and_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    operation = Operation(1)
    heard = []
    operation.add_done_callback(lambda _: 1 / 0)  # type: ignore[arg-type, return-value]
    operation.add_done_callback(heard.append)
    operation.part_done(None)
    assert heard == [operation]
    assert "ZeroDivisionError" in caplog.text


def test_every_waiter_is_woken() -> None:
    operation = Operation(1)
    woken = []

    def wait() -> None:
        operation.get(timeout=10)
        woken.append(1)

    threads = [threading.Thread(target=wait) for _ in range(5)]
    for thread in threads:
        thread.start()
    operation.part_done(None)
    for thread in threads:
        thread.join()
    assert len(woken) == 5


async def test_it_can_be_awaited_from_several_tasks_while_another_thread_ends_it() -> None:
    operation = Operation(1)

    async def wait() -> None:
        await operation

    tasks = [asyncio.create_task(wait()) for _ in range(3)]
    await asyncio.sleep(0)
    threading.Thread(target=operation.part_done, args=(ValueError("for all"),)).start()
    assert [type(result) for result in await asyncio.gather(*tasks, return_exceptions=True)] == [ValueError] * 3


async def test_a_cancelled_wait_does_not_disturb_the_operation() -> None:
    operation = Operation(1)

    async def wait() -> None:
        await operation

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(wait(), 0.01)
    operation.part_done(None)
    await operation


def test_a_loop_that_is_gone_when_it_ends_is_no_error() -> None:
    operation = Operation(1)
    loop = asyncio.new_event_loop()

    async def wait() -> None:
        await operation

    with pytest.raises(TimeoutError):
        loop.run_until_complete(asyncio.wait_for(wait(), 0.01))
    loop.close()
    operation.part_done(None)


def test_callbacks_of_a_finished_operation_run_at_once() -> None:
    seen: list[Operation] = []
    DONE.add_done_callback(seen.append)
    failed = Operation.failed(OSError())
    failed.add_done_callback(seen.append)
    assert seen == [DONE, failed]


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_a_wait_needs_a_positive_timeout(timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout"):
        Operation(1).get(timeout=timeout)


def test_a_finished_operation_does_not_wait_at_all() -> None:
    begin = time.perf_counter()
    DONE.get(timeout=5)
    assert time.perf_counter() - begin < 1
