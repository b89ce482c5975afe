"""What a future is made of: one object for each call, which threads may settle, open and wait for as they like."""

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable

import pytest

from skipper.control import ForkedProcessError
from skipper.control.model import forked
from skipper.control.model.future import Gate, Promise, peek, unread_error
from tests.control.conftest import PATIENCE_S

MANY = 8


def together(*functions: Callable[[], object]) -> None:
    """Call functions in threads of their own that begin at the same time."""
    start = threading.Barrier(len(functions))

    def run(function: Callable[[], object]) -> None:
        start.wait(PATIENCE_S)
        function()

    threads = [threading.Thread(target=run, args=(function,), daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_the_collector_looks_at_a_future_only_if_it_may_lead_back_to_itself() -> None:
    future: Promise[object] = Promise()
    assert not gc.is_tracked(future)
    future.settle_by(lambda payload: 5, (b"plain",))
    assert future.get() == 5
    assert not gc.is_tracked(future)
    container: Promise[object] = Promise()
    container.settle_by(lambda payload: [], (b"plain",))
    assert container.get() == []
    assert gc.is_tracked(container)
    for change in (
        lambda future: future.add_done_callback(print),
        lambda future: future.hold(object()),
        lambda future: future.settle_by(lambda: 5),
        lambda future: future.settle_by(lambda given: 5, ([],)),
        lambda future: setattr(future, "pending", future),
    ):
        changed: Promise[int] = Promise()
        change(changed)
        assert gc.is_tracked(changed)


def test_an_error_makes_a_future_one_that_the_collector_looks_at() -> None:
    future: Promise[int] = Promise()

    def fail(payload: object) -> int:
        raise ValueError("no")

    future.settle_by(fail, (b"plain",))
    assert not gc.is_tracked(future)
    with pytest.raises(ValueError, match="no"):
        future.get()
    assert gc.is_tracked(future)


@pytest.mark.parametrize("leads_back", ["callback", "held", "open", "value", "pending"])
def test_a_future_that_leads_back_to_itself_is_collected(leads_back: str) -> None:
    future: Promise[object] = Promise()
    box: list[object] = [future]
    if leads_back == "callback":
        future.add_done_callback(box.append)
    elif leads_back == "held":
        future.hold(box)
    elif leads_back == "open":
        future.settle_by(lambda box=box: box)
    elif leads_back == "value":
        future.set_result(box)
        peek(future)
    else:
        future.pending = box  # type: ignore[assignment]  # anything that knows it
    ended = weakref.ref(future)
    del future, box
    gc.collect()
    assert ended() is None


def test_a_future_that_nobody_has_is_freed_at_once() -> None:
    future: Promise[int] = Promise()
    ended = weakref.ref(future)
    future.settle_by(lambda payload: 5, (b"plain",))
    assert future.get() == 5
    del future
    assert ended() is None


def test_every_callback_runs_once_whichever_threads_add_and_settle() -> None:
    for _ in range(200):
        future: Promise[int] = Promise()
        called: list[int] = []

        def add(future: Promise[int] = future, called: list[int] = called) -> None:
            for number in range(5):
                future.add_done_callback(lambda _, number=number: called.append(number))  # type: ignore[misc]

        together(add, add, lambda future=future: future.set_result(1), lambda future=future: future.set_result(2))  # type: ignore[misc]
        assert sorted(called) == sorted([*range(5), *range(5)])


def test_callbacks_run_in_the_order_in_which_they_were_added() -> None:
    future: Promise[int] = Promise()
    called: list[int] = []
    for number in range(4):
        future.add_done_callback(lambda _, number=number: called.append(number))  # type: ignore[misc]
    future.set_result(1)
    assert called == [0, 1, 2, 3]


def test_what_has_come_is_opened_once_however_many_ask_for_it() -> None:
    for _ in range(50):
        future: Promise[object] = Promise()
        opened: list[int] = []

        def open_it(opened: list[int] = opened) -> object:
            for _ in range(100):
                opened.append(threading.get_ident())
            return object()

        future.settle_by(open_it)
        seen: list[object] = []
        together(*[lambda future=future, seen=seen: seen.append(future.get(PATIENCE_S))] * MANY)  # type: ignore[misc]
        assert len(seen) == MANY
        assert len(set(map(id, seen))) == 1
        assert len(set(opened)) == 1
        assert len(opened) == 100


def test_those_who_ask_while_it_is_being_opened_wait_for_that() -> None:
    future: Promise[int] = Promise()
    begun, may_go_on = threading.Event(), threading.Event()

    def open_it() -> int:
        begun.set()
        assert may_go_on.wait(PATIENCE_S)
        return 7

    future.settle_by(open_it)
    seen: list[int] = []
    first = threading.Thread(target=lambda: seen.append(future.get()), daemon=True)
    first.start()
    assert begun.wait(PATIENCE_S)
    others = [threading.Thread(target=lambda: seen.append(future.get()), daemon=True) for _ in range(MANY)]
    for other in others:
        other.start()
    assert seen == []
    may_go_on.set()
    for thread in (first, *others):
        thread.join(PATIENCE_S)
    assert seen == [7] * (MANY + 1)


def test_who_is_interrupted_while_opening_leaves_it_to_the_next() -> None:
    future: Promise[int] = Promise()
    interrupts = [KeyboardInterrupt()]

    def open_it() -> int:
        if interrupts:
            raise interrupts.pop()
        return 8

    future.settle_by(open_it)
    with pytest.raises(KeyboardInterrupt):
        future.get()
    assert future.get() == 8


def test_a_result_that_asks_for_itself_is_an_error_and_no_hang() -> None:
    future: Promise[int] = Promise()
    future.settle_by(lambda: future.get())
    with pytest.raises(RuntimeError, match="asked for by what is called"):
        future.get()


def test_who_is_interrupted_in_a_callback_settles_again_and_nobody_is_forgotten() -> None:
    future: Promise[int] = Promise()
    called: list[str] = []
    interrupts = [KeyboardInterrupt()]

    def interrupted(_: object) -> None:
        called.append("first")
        if interrupts:
            raise interrupts.pop()

    future.add_done_callback(interrupted)
    future.add_done_callback(lambda _: called.append("second"))
    with pytest.raises(KeyboardInterrupt):
        future.set_result(1)
    assert called == ["first"]
    future.set_result(2)
    assert called == ["first", "first", "second"]
    assert future.get() == 1


def test_a_callback_that_settles_and_adds_does_not_run_again() -> None:
    future: Promise[int] = Promise()
    called: list[str] = []

    def callback(_: object) -> None:
        called.append("outer")
        future.set_result(2)
        future.add_done_callback(lambda _: called.append("inner"))

    future.add_done_callback(callback)
    future.set_result(1)
    assert called == ["outer", "inner"]


def test_looking_whether_somebody_has_asked_opens_nothing() -> None:
    future: Promise[int] = Promise()
    assert unread_error(future) is None
    error = ValueError("x")
    future.set_exception(error)
    assert unread_error(future) is error


def test_a_gate_lets_on_once_for_each_opening() -> None:
    gate = Gate()
    gate.open()
    gate.open()
    gate.wait(0)
    assert not gate.is_open
    gate.wait(0)
    assert not gate.lock.acquire(blocking=False)


def test_in_a_forked_copy_nobody_waits_for_a_thread_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    future: Promise[int] = Promise()
    begun, may_go_on = threading.Event(), threading.Event()

    def open_it() -> int:
        begun.set()
        assert may_go_on.wait(PATIENCE_S)
        return 7

    future.settle_by(open_it)
    opening = threading.Thread(target=future.get, daemon=True)
    opening.start()
    assert begun.wait(PATIENCE_S)
    with monkeypatch.context() as copy:
        copy.setattr(forked, "original", "another process")  # which is what a copy finds there
        with pytest.raises(ForkedProcessError):
            future.get()
    may_go_on.set()
    opening.join(PATIENCE_S)
    assert future.get() == 7


def test_it_is_no_leak_to_make_many_and_to_forget_them() -> None:
    gc.collect()
    with contextlib.ExitStack() as stack:
        gc.disable()
        stack.callback(gc.enable)
        before = len(gc.get_objects())
        futures = [Promise[int]() for _ in range(1000)]
        assert len(gc.get_objects()) - before < 50
        del futures
