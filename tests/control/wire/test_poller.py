"""One thread reads for all that wait: each message comes once, in order, and wakes who waits for it."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from skipper.control.model.future import Gate
from skipper.control.wire._poller import MAX_NBYTES, Poller, on_stream_thread
from tests.control.conftest import PATIENCE_S, wait_until
from tests.control.wire.packets import (
    REPLY,
    ask,
    call_until_it_reads,
    check_all_came,
    connected,
    echo,
    in_thread,
    join,
)


@pytest.fixture
def poller() -> Iterator[Poller]:
    poller = Poller("poller")
    yield poller
    poller.close()


def test_what_nobody_waits_for_is_read_by_the_thread_of_the_poller(poller: Poller) -> None:
    with connected(poller) as (user, _, there):
        for number in range(100):
            there.send(b"\0%d" % number)
        wait_until(lambda: len(user.came) == 100, "all to be delivered")
        assert user.came == [b"\0%d" % number for number in range(100)]
        assert set(user.threads) == {"poller"}
        there.close()
        assert user.is_over.wait(PATIENCE_S)


def test_a_thread_that_waits_reads_the_answer_itself(poller: Poller) -> None:
    with connected(poller) as (user, _, there):
        for number in range(20):
            answer = REPLY + b"%d" % number
            gate = user.gates[answer] = Gate()
            asker = in_thread("asker", lambda gate=gate: poller.wait(gate, PATIENCE_S, False))
            wait_until(lambda gate=gate: gate.reader is not None, "the thread to read")
            there.send(answer)
            join(asker)
        assert user.threads == ["asker"] * 20
        assert not on_stream_thread()


def test_what_is_no_answer_is_left_to_the_thread_of_the_poller_and_order_holds(poller: Poller) -> None:
    """In a thread of a user's only what may be delivered twice is delivered, and nothing overtakes the rest."""
    with connected(poller) as (user, _, there):
        last = REPLY + b"last"
        gate = user.gates[last] = Gate()
        asker = in_thread("asker", lambda: poller.wait(gate, PATIENCE_S, False))
        wait_until(lambda: gate.reader is not None, "the thread to read")
        sent = [b"\0call" if number % 3 == 0 else REPLY + b"%d" % number for number in range(200)] + [last]
        for message in sent:
            there.send(message)
        join(asker)
        wait_until(lambda: len(user.came) == len(sent), "all to be delivered")
        assert user.came == sent
        assert {name for name, message in zip(user.threads, user.came, strict=True) if message == b"\0call"} == {
            "poller"
        }


def test_an_idle_actor_reads_everything_itself(poller: Poller) -> None:
    with connected(poller) as (user, _, there):
        gate = user.gates[b"\0call"] = Gate()
        idle = in_thread("idle", lambda: poller.wait(gate, -1, True))
        wait_until(lambda: gate.reader is not None, "the thread to read")
        there.send(b"\0call")
        join(idle)
        assert user.threads == ["idle"]


def test_the_reading_goes_to_the_idle_actor_that_is_called_again_and_again(poller: Poller) -> None:
    with connected(poller) as (user, _, there):
        at_rest = Gate()
        resting = in_thread("resting", lambda: poller.wait(at_rest, -1, True))
        wait_until(lambda: at_rest.reader is not None, "the first one to read")
        call_until_it_reads(poller, user, there)
        assert user.threads[0] == "resting"
        at_rest.open()
        join(resting)


def test_idle_actors_that_are_called_in_turns_do_not_take_the_reading_from_each_other(poller: Poller) -> None:
    with connected(poller) as (user, _, there):
        at_rest = Gate()
        resting = in_thread("resting", lambda: poller.wait(at_rest, -1, True))
        wait_until(lambda: at_rest.reader is not None, "the first one to read")
        gates = {b"\0one": Gate(), b"\0two": Gate()}
        user.gates.update(gates)

        def handle_calls(gate: Gate) -> None:
            for _ in range(10):
                poller.wait(gate, -1, True)
                gate.is_open = False

        threads = [in_thread("called", lambda gate=gate: handle_calls(gate)) for gate in gates.values()]
        for number in range(20):
            call = (b"\0one", b"\0two")[number % 2]
            wait_until(lambda call=call: not gates[call].is_open, "the call before to be taken")
            there.send(call)
            wait_until(lambda number=number: len(user.came) == number + 1, "the call to be delivered")
        for thread in threads:
            join(thread)
        assert set(user.threads) == {"resting"}
        at_rest.open()
        join(resting)


def test_strangers_messages_are_never_taken_for_answers(poller: Poller) -> None:
    with connected(poller, repeats=False) as (user, _, there):
        gate = user.gates[REPLY] = Gate()
        asker = in_thread("asker", lambda: poller.wait(gate, PATIENCE_S, False))
        wait_until(lambda: gate.reader is not None, "the thread to read")
        there.send(REPLY)
        join(asker)
        assert user.threads == ["poller"]


def test_an_answer_that_was_interrupted_is_delivered_again(poller: Poller) -> None:
    raised: list[BaseException] = []
    with connected(poller) as (user, _, there):
        user.interrupts = 1
        gate = user.gates[REPLY] = Gate()

        def ask() -> None:
            try:
                poller.wait(gate, PATIENCE_S, False)
            except KeyboardInterrupt as error:
                raised.append(error)

        asker = in_thread("asker", ask)
        wait_until(lambda: gate.reader is not None, "the thread to read")
        there.send(REPLY)
        there.send(b"\0behind")
        join(asker)
        wait_until(lambda: len(user.came) == 2, "both to be delivered")
        assert raised
        assert user.came == [REPLY, b"\0behind"]


def test_a_gate_that_another_thread_opens_ends_the_wait_of_the_one_that_reads(poller: Poller) -> None:
    with connected(poller):
        gate = Gate()
        asker = in_thread("asker", lambda: poller.wait(gate, -1, False))
        wait_until(lambda: gate.reader is not None, "the thread to read")
        gate.open()
        join(asker)


def test_the_time_limit_holds_for_those_that_read_and_those_that_follow(poller: Poller) -> None:
    with connected(poller):
        leader, follower = Gate(), Gate()
        begin = time.monotonic()
        threads = [in_thread("asker", lambda gate=gate: poller.wait(gate, 0.05, False)) for gate in (leader, follower)]
        for thread in threads:
            join(thread)
        assert time.monotonic() - begin >= 0.05


def test_a_wait_may_last_as_long_as_a_lock_may_be_waited_for(poller: Poller) -> None:
    with connected(poller):
        gate = Gate()
        asker = in_thread("asker", lambda: poller.wait(gate, threading.TIMEOUT_MAX, False))
        wait_until(lambda: gate.reader is not None, "the thread to read")
        assert asker.is_alive()
        gate.open()
        join(asker)


def test_who_reads_goes_and_the_next_one_goes_on(poller: Poller) -> None:
    """Twenty threads wait, each for its own answer, and the answers come in another order."""
    with connected(poller) as (user, _, there):
        gates = {REPLY + b"%d" % number: Gate() for number in range(20)}
        user.gates = dict(gates)
        threads = [in_thread("asker", lambda gate=gate: poller.wait(gate, -1, False)) for gate in gates.values()]
        for number in (7, 0, 19, 3, *(n for n in range(20) if n not in (7, 0, 19, 3))):
            there.send(REPLY + b"%d" % number)
            time.sleep(0.002)
        for thread in threads:
            join(thread)
        assert len(user.came) == 20


def test_the_thread_of_the_poller_gives_way_and_comes_back(poller: Poller) -> None:
    with connected(poller) as (user, _, there):
        for number in range(10):
            there.send(b"\0idle")
            wait_until(lambda number=number: len(user.came) == 2 * number + 1, "the poller to read")
            gate = user.gates[REPLY] = Gate()
            asker = in_thread("asker", lambda gate=gate: poller.wait(gate, -1, False))
            wait_until(lambda gate=gate: gate.reader is not None, "the thread to read")
            there.send(REPLY)
            join(asker)
        assert user.threads == ["poller", "asker"] * 10


def test_what_is_delivered_may_wait_itself(poller: Poller) -> None:
    """A callback of a user's that waits for another answer gets it, whichever thread it runs in."""
    with connected(poller) as (user, _, there), connected(poller) as (inner_user, _, inner_there):
        inner_gate = inner_user.gates[REPLY] = Gate()
        gate = Gate()
        entered = threading.Event()

        def received(message: bytes) -> None:
            entered.set()
            poller.wait(inner_gate, PATIENCE_S, False)
            gate.open()

        user.received = received  # type: ignore[method-assign]
        for thread_reads in (False, True):
            entered.clear()
            asker = in_thread("asker", lambda: poller.wait(gate, PATIENCE_S, False)) if thread_reads else None
            there.send(REPLY)
            assert entered.wait(PATIENCE_S)
            inner_there.send(REPLY)
            wait_until(lambda: gate.is_open, "the wait within to end")
            if asker is not None:
                join(asker)
            gate.is_open = inner_gate.is_open = False


def test_the_thread_of_the_poller_gives_up_reading_while_it_delivers(poller: Poller) -> None:
    with connected(poller) as (user, _, there), connected(poller) as (inner_user, _, inner_there):
        inner_gate = inner_user.gates[REPLY] = Gate()
        is_over = threading.Event()

        def received(message: bytes) -> None:
            poller.wait(inner_gate, PATIENCE_S, False)
            is_over.set()

        user.received = received  # type: ignore[method-assign]
        there.send(b"\0call")
        wait_until(lambda: inner_gate.reader is not None, "the poller's thread to wait within what it delivers")
        gate = Gate()
        asker = in_thread("asker", lambda: poller.wait(gate, PATIENCE_S, False))
        wait_until(lambda: gate.reader is not None, "the asker to read")
        assert inner_gate.reader is None
        inner_there.send(REPLY)
        assert is_over.wait(PATIENCE_S)
        assert inner_user.threads == ["asker"]
        gate.open()
        join(asker)


def test_a_full_socket_takes_the_next_message_once_there_is_room(poller: Poller) -> None:
    with connected(poller) as (user, read, there):
        message = bytes(MAX_NBYTES)
        sent = 0
        while read.send(message):
            sent += 1
        assert sent > 0
        poller.want_out(read)
        assert not user.may_go_on.wait(0.05)
        for _ in range(sent):
            assert len(there.recv(MAX_NBYTES + 1)) == MAX_NBYTES
        assert user.may_go_on.wait(PATIENCE_S)
        assert read.send(b"more")
        assert there.recv(10) == b"more"


def test_who_sends_more_than_a_message_may_have_is_hung_up(poller: Poller) -> None:
    with connected(poller) as (user, _, there):
        there.send(bytes(MAX_NBYTES + 1))
        assert user.is_over.wait(PATIENCE_S)
        assert user.came == []


def test_what_the_other_end_sent_before_it_left_is_read(poller: Poller) -> None:
    """It leaves without reading all that it was sent, which the system tells first."""
    with connected(poller) as (user, read, there):
        for _ in range(5):
            read.send(b"unread")
        for number in range(5):
            there.send(b"\0%d" % number)
        there.close()
        assert user.is_over.wait(PATIENCE_S)
        assert user.came == [b"\0%d" % number for number in range(5)]


def test_a_signal_ends_the_wait_of_the_main_thread(poller: Poller) -> None:
    def stop(number: int, frame: object) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGUSR1, stop)
    try:
        with connected(poller):
            gate = Gate()
            threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGUSR1)).start()
            with pytest.raises(InterruptedError):
                poller.wait(gate, PATIENCE_S, False)
            assert gate.reader is None
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_who_waits_at_a_poller_that_is_closed_is_let_on_by_its_gate(poller: Poller) -> None:
    gate = Gate()
    asker = in_thread("asker", lambda: poller.wait(gate, -1, False))
    wait_until(lambda: gate.reader is not None, "the thread to read")
    poller.close()
    gate.open()
    join(asker)


def test_nobody_is_busy_while_nothing_comes(poller: Poller) -> None:
    with connected(poller) as (user, _, there):
        there.send(b"\0")
        wait_until(lambda: len(user.came) == 1, "the poller to read")
        begin = time.process_time()
        gate = Gate()
        poller.wait(gate, 0.5, False)
        assert time.process_time() - begin < 0.1


def test_many_threads_and_sockets_lose_nothing(poller: Poller) -> None:
    """Askers, idle actors and the poller take turns in every order; each message comes once and in order."""
    with contextlib.ExitStack() as stack:
        ends = [stack.enter_context(connected(poller)) for _ in range(4)]
        threads = [in_thread("echo", lambda there=there: echo(there)) for _, _, there in ends]
        threads += [
            in_thread("asker", lambda user=user, read=read, n=n: ask(poller, user, read, takes_all=n % 2 == 0))
            for n, (user, read, _) in enumerate(ends)
        ]
        for thread in threads:
            join(thread)
        check_all_came(user for user, _, _ in ends)
