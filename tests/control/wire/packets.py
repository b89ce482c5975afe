"""Sockets that a poller reads, and users that note what comes."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

from skipper.control.model.future import Gate
from skipper.control.wire._poller import REPLIES, PacketSocket, Poller
from skipper.control.wire.message_stream import on_stream_thread
from tests.control.conftest import PATIENCE_S

REPLY = bytes((REPLIES,))


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
