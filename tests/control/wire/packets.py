"""Sockets that a poller reads, and users that note what comes."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

from skipper.control.model.future import Gate
from skipper.control.wire._poller import REPLIES, PacketSocket, Poller, on_stream_thread
from tests.control.conftest import PATIENCE_S, wait_until

REPLY = bytes((REPLIES,))
ROUNDS = 300
"""Of `echo` and who asks it."""


class NotingUser:
    """Notes what comes, and in which thread."""

    def __init__(self) -> None:
        self.came: list[bytes] = []
        self.threads: list[str] = []
        self.gates: dict[bytes, Gate] = {}
        self.is_over = threading.Event()
        self.may_go_on = threading.Event()
        self.interrupts = 0

    def received(self, message: bytes) -> None:
        """Note a message, and let on who waits for it."""
        assert on_stream_thread()
        if self.interrupts:
            self.interrupts -= 1
            raise KeyboardInterrupt
        self.came.append(message)
        self.threads.append(threading.current_thread().name)
        if message in self.gates:
            self.gates[message].open()

    def writable(self) -> None:
        """There is room again."""
        self.may_go_on.set()

    def hung_up(self) -> None:
        """The other end has left."""
        self.is_over.set()


@contextlib.contextmanager
def connected(poller: Poller, *, repeats: bool = True) -> Iterator[tuple[NotingUser, PacketSocket, socket.socket]]:
    """A socket that the poller reads, its user, and the other end."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    there.settimeout(PATIENCE_S)
    user = NotingUser()
    read = PacketSocket(here.detach(), user)
    read.repeats = repeats
    poller.add(read)
    with there:
        yield user, read, there
    poller.remove(read)
    read.close()


def in_thread(name: str, function: Any) -> threading.Thread:
    """A thread that has begun."""
    thread = threading.Thread(target=function, name=name, daemon=True)
    thread.start()
    return thread


def join(thread: threading.Thread) -> None:
    """Wait for a thread's end."""
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def echo(there: socket.socket) -> None:
    """Answer what is asked at the other end, now and then behind something that is no answer."""
    for number in range(ROUNDS):
        message = there.recv(100)
        if number % 3 == 0:
            there.send(b"\0" + message)
        there.send(REPLY + message)


def ask(poller: Poller, user: NotingUser, read: PacketSocket, *, takes_all: bool) -> None:
    """Ask `echo` and wait, again and again, with a rest now and then."""
    for number in range(ROUNDS):
        gate = user.gates[REPLY + b"%d" % number] = Gate()
        read.send(b"%d" % number)
        poller.wait(gate, -1, takes_all)
        if number % 50 == 0:
            time.sleep(0.002)


def call_until_it_reads(poller: Poller, user: NotingUser, there: socket.socket) -> None:
    """Call an idle actor, which another one reads for at first, until its own thread delivers the calls."""
    gate = user.gates[b"\0call"] = Gate()
    is_over = False

    def handle_calls() -> None:
        while not is_over:
            poller.wait(gate, -1, True)
            gate.is_open = False

    called = in_thread("called", handle_calls)
    for number in range(ROUNDS):
        wait_until(lambda: not gate.is_open, "the call before to be taken")
        there.send(b"\0call")
        wait_until(lambda number=number: len(user.came) == number + 1, "the call to be delivered")
        if user.threads[-1] == "called":
            break
    assert user.threads[-1] == "called"
    is_over = True
    gate.open()
    join(called)


def check_all_came(users: Iterable[NotingUser]) -> None:
    """See that each got all that `echo` sends, once and in order."""
    expected: list[bytes] = []
    for number in range(ROUNDS):
        expected += [b"\0%d" % number] if number % 3 == 0 else []
        expected.append(REPLY + b"%d" % number)
    for user in users:
        wait_until(lambda user=user: len(user.came) == len(expected), "the rest to come")
        assert user.came == expected
