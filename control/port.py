"""`Port`, `PortReceiver` and `Channel`: messages beside the calls."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from control.errors import ChannelClosedError
from control.failure import MeshFailure
from control.future import Future
from control.runtime import job as runtime
from control.runtime.replies import open_reply, pack_exception, pack_supervision
from control.wire.envelope import Kind, Payload, ProcessRef
from control.wire.payload import pack

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReplyAddress:
    """Where a port is: a number in a process; ``rank`` tells apart those who share a number."""

    process: ProcessRef
    number: int
    rank: int


class Port(Generic[T]):
    """The sending end: of a channel, or of the answer that an endpoint with an explicit response port owes.

    Ports may be kept, used from any thread, and sent to other actors. An answer can be given once; what is sent after
    that has no effect.
    """

    def __init__(self, address: ReplyAddress, *, owed: bool = False) -> None:
        self._address = address
        self._owed = owed

    def send(self, value: T) -> None:
        """Send a value; it arrives after those sent before from this process.

        Raises:
            PayloadError: the value cannot be pickled.
        """
        self._send(Kind.REPLY, pack(value))

    def exception(self, error: BaseException) -> None:
        """Send an error, which is raised at the receiver as `ActorError` with this as its cause."""
        here = runtime.current().me.name
        self._send(Kind.ERROR, pack_exception(error, actor_id=here, endpoint="port"))

    def _refuse(self, reason: str, failure: MeshFailure | None) -> None:
        """Answer in place of an actor that will not, unless it has, or has given the port to somebody else."""
        if self._owed and runtime.is_running():
            self._send(Kind.ERROR, pack_supervision(f"the answer will not come: {reason}", failure))

    def _send(self, kind: Kind, payload: Payload) -> None:
        self._owed = False
        if self._address.number:
            runtime.current().send_to_port(self._address, kind, payload)

    def __reduce__(self) -> tuple[Any, ...]:
        self._owed = False
        return (Port, (self._address,))

    def __del__(self) -> None:
        # The caller waits for an answer that nobody can give any more: an error ends that wait.
        self._refuse("the actor has dropped the response port", None)


class PortReceiver(Generic[T]):
    """The receiving end of a channel, in the process that opened it."""

    def __init__(self, inbox: _Inbox) -> None:
        self._inbox = inbox

    def recv(self) -> Future[T]:
        """The next value: ``await`` it, or ``get`` it with a timeout. Values come in the order of their arrival.

        Raises (from the future):
            ActorError: the sender sent an exception.
            ChannelClosedError: the channel was closed and everything that had arrived has been received.
        """
        return self._inbox.take()

    def close(self) -> None:
        """Close the channel: pending and later receives raise `ChannelClosedError`. May be called again."""
        self._inbox.close()


class Channel:
    """A way for values into this process, for one receiver and any number of senders."""

    @staticmethod
    def open() -> tuple[Port[Any], PortReceiver[Any]]:
        """A port to give away and the receiver for what is sent to it; it closes when the receiver is forgotten."""
        process = runtime.current()
        inbox = _Inbox()
        number = process.ports.open(inbox)
        inbox.on_close = lambda: process.ports.close(number)
        receiver: PortReceiver[Any] = PortReceiver(inbox)
        weakref.finalize(receiver, inbox.close).atexit = False
        return Port(ReplyAddress(process.me, number, 0)), receiver


class _Inbox:
    """Matches what arrives with those who wait for it."""

    def __init__(self) -> None:
        self.on_close: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._arrived: deque[Callable[[], Any]] = deque()
        # Weak, so that a receive that timed out and was forgotten does not swallow the next value.
        self._waiting: deque[weakref.ref[Future[Any]]] = deque()
        self._closed = False

    def deliver(self, rank: int, kind: Kind, payload: Payload) -> bool:
        self._push(lambda: open_reply(kind, payload))
        return self._closed

    def process_lost(self, process_id: str, reason: str) -> bool:
        return False  # anybody may hold the port: who is gone was not necessarily the only sender

    def take(self) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if not self._arrived:
                if not self._closed:
                    self._waiting.append(weakref.ref(future))
                    return future
                self._arrived.append(_raise_closed)
            opened = self._arrived.popleft()
        future._settle(opened)
        return future

    def close(self) -> None:
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, deque()
        for reference in waiting:
            if (future := reference()) is not None:
                future._settle(_raise_closed)
        if self.on_close is not None:
            self.on_close()

    def _push(self, opened: Callable[[], Any]) -> None:
        with self._lock:
            future = None
            while self._waiting and future is None:
                future = self._waiting.popleft()()
            if future is None:
                self._arrived.append(opened)
                return
        future._settle(opened)


def _raise_closed() -> Any:
    raise ChannelClosedError("the channel is closed")
