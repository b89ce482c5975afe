"""An event loop reads what its coroutines wait for; what it is kept from, others read."""

import asyncio
import contextlib
import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import uvloop

from skipper.control.model.future import Gate
from skipper.control.wire._poller import PacketSocket, Poller
from tests.control.conftest import PATIENCE_S, wait_until
from tests.control.wire.packets import (
    REPLY,
    ROUNDS,
    NotingUser,
    ask,
    call_until_it_reads,
    check_all_came,
    connected,
    echo,
    in_thread,
    join,
)

Loops = Callable[[], asyncio.AbstractEventLoop]


@pytest.fixture
def poller() -> Iterator[Poller]:
    poller = Poller("poller")
    yield poller
    poller.close()


class LoopInThread:
    """An event loop that runs in a thread named ``loop``."""

    def __init__(self, make: Loops) -> None:
        self.loop = make()
        self._thread = in_thread("loop", self._run)

    def _run(self) -> None:
        self.loop.run_forever()
        self.loop.close()

    def do(self, function: Callable[[], object]) -> None:
        """Call a function there and wait for its end."""
        done = threading.Event()

        def call() -> None:
            function()
            done.set()

        self.loop.call_soon_threadsafe(call)
        assert done.wait(PATIENCE_S)

    def close(self) -> None:
        """End loop and thread; idempotent."""
        with contextlib.suppress(RuntimeError):  # it is closed
            self.loop.call_soon_threadsafe(self.loop.stop)
        join(self._thread)


@pytest.fixture(params=[asyncio.SelectorEventLoop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def loops(request: pytest.FixtureRequest) -> Iterator[Callable[[], LoopInThread]]:
    with contextlib.ExitStack() as stack:

        def start() -> LoopInThread:
            return stack.enter_context(contextlib.closing(LoopInThread(request.param)))

        yield start


def settle() -> None:
    """Let the poller's thread give up reading, and a loop rest that had no processor when its turn came."""
    time.sleep(0.03)


def mostly(user: NotingUser) -> str:
    """The thread that read most: on a busy machine a loop may miss its turn."""
    return max(set(user.threads), key=user.threads.count)


def serve(
    own: LoopInThread, poller: Poller, there: socket.socket, user: NotingUser, messages: list[bytes], **how: bool
) -> None:
    """Send messages, each once the loop reads and the one before has come."""
    for message in messages:
        own.do(lambda: poller.read_in(own.loop, **how))
        settle()
        send_all(there, user, [message])


def serve_until_it_reads(own: LoopInThread, poller: Poller, there: socket.socket, user: NotingUser) -> None:
    """Send messages in the same way until the loop has read one: on a busy machine it may miss several turns."""
    for _ in range(100):
        serve(own, poller, there, user, [REPLY])
        if user.threads[-1] == "loop":
            return
    pytest.fail("the loop never read")


def send_all(there: socket.socket, user: NotingUser, messages: list[bytes]) -> None:
    """Send messages, each once the one before has come."""
    for message in messages:
        before = len(user.came)
        there.send(message)
        wait_until(lambda before=before: len(user.came) > before, "a message to come")


def test_a_loop_reads_the_answers_itself(poller: Poller, loops: Callable[[], LoopInThread]) -> None:
    with connected(poller) as (user, _, there):
        own = loops()
        serve(own, poller, there, user, [REPLY + b"%d" % number for number in range(20)])
        assert mostly(user) == "loop"
        there.close()
        assert user.is_over.wait(PATIENCE_S)


def test_what_is_no_answer_is_left_to_the_thread_of_the_poller(
    poller: Poller, loops: Callable[[], LoopInThread]
) -> None:
    with connected(poller) as (user, _, there):
        own = loops()
        sent = [b"\0call" if number % 10 == 5 else REPLY + b"%d" % number for number in range(30)]
        serve(own, poller, there, user, sent)
        assert user.came == sent
        calls = {name for name, message in zip(user.threads, user.came, strict=True) if message == b"\0call"}
        assert calls == {"poller"}
        assert mostly(user) == "loop"


def test_the_loop_of_an_actor_reads_everything(poller: Poller, loops: Callable[[], LoopInThread]) -> None:
    with connected(poller) as (user, _, there):
        own = loops()
        serve(own, poller, there, user, [b"\0call"] * 20, takes_all=True)
        assert mostly(user) == "loop"


def test_a_loop_that_gets_calls_only_leaves_the_reading_to_the_thread_of_the_poller(
    poller: Poller, loops: Callable[[], LoopInThread]
) -> None:
    with connected(poller) as (user, _, there):
        own = loops()
        own.do(lambda: poller.read_in(own.loop))
        send_all(there, user, [b"\0value"] * 50)
        reads: list[str] = []
        user.received = lambda message: reads.append(threading.current_thread().name)  # type: ignore[method-assign]
        there.send(REPLY)
        wait_until(lambda: len(reads) == 1, "an answer to come")
        assert reads == ["poller"]


def test_a_loop_that_runs_something_long_keeps_nobody_waiting(
    poller: Poller, loops: Callable[[], LoopInThread]
) -> None:
    """The poller's thread reads meanwhile, and the loop reads again after a while."""
    with connected(poller) as (user, _, there):
        own = loops()
        own.do(lambda: poller.read_in(own.loop))
        settle()
        free, is_busy = threading.Event(), threading.Event()

        def be_busy() -> None:
            is_busy.set()
            free.wait(PATIENCE_S)

        own.loop.call_soon_threadsafe(be_busy)
        assert is_busy.wait(PATIENCE_S)
        send_all(there, user, [REPLY] * 20)
        assert set(user.threads) == {"poller"}
        free.set()
        serve_until_it_reads(own, poller, there, user)


def test_what_comes_once_a_loop_is_closed_is_read(poller: Poller, loops: Callable[[], LoopInThread]) -> None:
    with connected(poller) as (user, _, there):
        first = loops()
        first.do(lambda: poller.read_in(first.loop))
        settle()
        first.close()
        send_all(there, user, [REPLY] * 3)
        assert user.threads == ["poller"] * 3


def test_the_next_loop_reads_once_one_is_closed(poller: Poller, loops: Callable[[], LoopInThread]) -> None:
    with connected(poller) as (user, _, there):
        first = loops()
        first.do(lambda: poller.read_in(first.loop))
        first.close()
        second = loops()
        serve_until_it_reads(second, poller, there, user)


def test_a_loop_that_waits_goes_before_that_of_an_idle_actor(poller: Poller, loops: Callable[[], LoopInThread]) -> None:
    with connected(poller) as (user, _, there):
        idle, waits = loops(), loops()
        readers: list[int] = []
        user.received = lambda message: readers.append(threading.get_ident())  # type: ignore[method-assign]
        for number in range(9):
            idle.do(lambda: poller.read_in(idle.loop, takes_all=True))
            waits.do(lambda: poller.read_in(waits.loop))
            idle.do(lambda: poller.read_in(idle.loop, takes_all=True))
            settle()
            there.send(REPLY)
            wait_until(lambda number=number: len(readers) == number + 1, "a message to come")
        threads: list[int] = []
        waits.do(lambda: threads.append(threading.get_ident()))
        assert max(set(readers), key=readers.count) == threads[0]


def test_the_loop_of_an_idle_actor_leaves_the_reading_to_the_one_that_is_called(
    poller: Poller, loops: Callable[[], LoopInThread]
) -> None:
    with connected(poller) as (user, _, there):
        idle = loops()
        idle.do(lambda: poller.read_in(idle.loop, takes_all=True))
        call_until_it_reads(poller, user, there)


def test_threads_that_wait_for_answers_go_before_an_idle_actor(poller: Poller) -> None:
    with connected(poller) as (user, _, there):
        at_rest = Gate()
        idle = in_thread("idle", lambda: poller.wait(at_rest, -1, True))
        wait_until(lambda: at_rest.reader is not None, "the idle actor to read")
        for _ in range(5):
            gate = user.gates[REPLY] = Gate()
            asker = in_thread("asker", lambda gate=gate: poller.wait(gate, PATIENCE_S, False))
            wait_until(lambda gate=gate: gate.reader is not None, "the asker to read")
            there.send(REPLY)
            join(asker)
        assert user.threads == ["asker"] * 5
        user.gates[b"\0call"] = at_rest
        there.send(b"\0call")
        join(idle)


def test_an_idle_actor_lets_a_loop_read_and_gets_its_own(poller: Poller, loops: Callable[[], LoopInThread]) -> None:
    with connected(poller) as (user, _, there):
        at_rest = user.gates[b"\0call"] = Gate()
        idle = in_thread("idle", lambda: poller.wait(at_rest, -1, True))
        wait_until(lambda: at_rest.reader is not None, "the idle actor to read")
        own = loops()
        own.do(lambda: poller.read_in(own.loop))
        wait_until(lambda: at_rest.reader is None, "the idle actor to give way")
        serve(own, poller, there, user, [REPLY] * 9)
        assert mostly(user) == "loop"
        there.send(b"\0call")
        join(idle)


def test_where_calls_come_the_loop_of_an_idle_actor_goes_before_one_that_waits_until_answers_come(
    poller: Poller, loops: Callable[[], LoopInThread]
) -> None:
    with connected(poller) as (user, _, there):
        idle, waits = loops(), loops()

        def be_called_waits() -> None:
            threading.current_thread().name = "waits"

        waits.do(be_called_waits)

        def send_until_read_by(reader: str, message: bytes) -> None:
            for _ in range(ROUNDS):
                waits.do(lambda: poller.read_in(waits.loop))
                idle.do(lambda: poller.read_in(idle.loop, takes_all=True))
                send_all(there, user, [message])
                if user.threads[-10:] == [reader] * 10:
                    return
            pytest.fail(f"{reader} did not read; last read {user.threads[-10:]}")

        for _ in range(3):
            send_until_read_by("loop", b"\0call")
            send_until_read_by("waits", REPLY)


def test_a_thread_that_waits_for_an_answer_has_the_loop_of_an_actor_that_is_called_read(
    poller: Poller, loops: Callable[[], LoopInThread]
) -> None:
    with connected(poller) as (user, _, there):
        gate = user.gates[REPLY] = Gate()
        asker = in_thread("asker", lambda: poller.wait(gate, PATIENCE_S, False))
        wait_until(lambda: gate.reader is not None, "the asker to read")
        actor = loops()
        for _ in range(ROUNDS):
            send_all(there, user, [b"\0call"])
            actor.do(lambda: poller.read_in(actor.loop, takes_all=True))
            if user.threads[-1] == "loop":
                break
        assert user.threads[0] == "poller"
        assert user.threads[-1] == "loop"
        assert asker.is_alive()
        there.send(REPLY)
        join(asker)
        assert user.came[-1] == REPLY


def test_a_loop_may_be_the_first_to_wait_within_what_it_delivers(
    poller: Poller, loops: Callable[[], LoopInThread]
) -> None:
    with connected(poller) as (user, _, there), connected(poller) as (inner_user, _, inner_there):
        inner_gate = inner_user.gates[REPLY] = Gate()
        entered, is_over = threading.Event(), threading.Event()

        def received(message: bytes) -> None:
            entered.set()
            poller.wait(inner_gate, PATIENCE_S, False)
            is_over.set()

        user.received = received  # type: ignore[method-assign]
        own = loops()
        own.do(lambda: poller.read_in(own.loop))
        settle()
        there.send(REPLY)
        assert entered.wait(PATIENCE_S)
        inner_there.send(REPLY)
        assert is_over.wait(PATIENCE_S)


def test_a_poller_that_is_closed_is_left_alone(loops: Callable[[], LoopInThread]) -> None:
    """As often as a runtime begins and ends within one event loop, nothing of it stays."""
    own = loops()
    fds = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        poller = Poller("poller")
        own.do(lambda poller=poller: poller.read_in(own.loop))
        settle()
        poller.close()
        del poller

    def are_gone() -> bool:
        gc.collect()
        return len(os.listdir("/proc/self/fd")) <= fds

    wait_until(are_gone, "the descriptors of the pollers to be closed")


def test_nobody_is_busy_while_nothing_comes(poller: Poller, loops: Callable[[], LoopInThread]) -> None:
    with connected(poller) as (user, _, there):
        own = loops()
        own.do(lambda: poller.read_in(own.loop))
        send_all(there, user, [REPLY, b"\0call", REPLY])
        begin = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - begin < 0.1


def test_loops_threads_and_actors_lose_nothing(poller: Poller, loops: Callable[[], LoopInThread]) -> None:
    """All take turns in every order, one loop stops now and then; each message comes once and in order."""
    with contextlib.ExitStack() as stack:
        ends = [stack.enter_context(connected(poller)) for _ in range(4)]
        own, idle = loops(), loops()

        async def ask_in_loop(user: NotingUser, read: PacketSocket) -> None:
            loop = asyncio.get_running_loop()
            for number in range(ROUNDS):
                waiter = loop.create_future()
                user.gates[REPLY + b"%d" % number] = OpensFuture(loop, waiter)  # type: ignore[assignment]
                poller.read_in(loop)
                read.send(b"%d" % number)
                await waiter
                if number % 50 == 0:
                    time.sleep(0.005)  # noqa: ASYNC251  (on purpose)

        threads = [in_thread("echo", lambda there=there: echo(there)) for _, _, there in ends]
        threads += [
            in_thread("asker", lambda user=user, read=read, n=n: ask(poller, user, read, takes_all=n % 2 == 0))
            for n, (user, read, _) in enumerate(ends[:2])
        ]
        asked = [asyncio.run_coroutine_threadsafe(ask_in_loop(user, read), own.loop) for user, read, _ in ends[2:]]
        for _ in range(10_000):
            if all(future.done() for future in asked):
                break
            idle.do(lambda: poller.read_in(idle.loop, takes_all=True))
        for future in asked:
            future.result(PATIENCE_S)
        for thread in threads:
            join(thread)
        check_all_came(user for user, _, _ in ends)


class OpensFuture:
    """In the place of a gate: what an event loop waits for."""

    def __init__(self, loop: asyncio.AbstractEventLoop, waiter: "asyncio.Future[None]") -> None:
        self._loop = loop
        self._waiter = waiter

    def open(self) -> None:
        """Let the coroutine on."""
        self._loop.call_soon_threadsafe(lambda: self._waiter.done() or self._waiter.set_result(None))
