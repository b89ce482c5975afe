"""`Port`, `PortReceiver` and `Channel`: messages besides calls."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

from skipper.control.model.errors import ChannelClosedError, ControlError, LinkError, PayloadError
from skipper.control.model.failure import MeshFailure
from skipper.control.model.future import Future, Promise, raising
from skipper.control.runtime import running
from skipper.control.runtime.context import context, local_actor
from skipper.control.runtime.interfaces import Ports
from skipper.control.runtime.messages import ActorRef, Loss, ReplyAddress
from skipper.control.runtime.replies import open_reply, pack_dropped, pack_exception, pack_supervision
from skipper.control.runtime.requests import LINK
from skipper.control.wire._plain import pickle_arguments
from skipper.control.wire.messages import Kind, Payload
from skipper.control.wire.payload import pack, pack_arguments

if TYPE_CHECKING:
    from typing_extensions import TypeVar as DefaultTypeVar

    from skipper.control.model.actor import ActorBase

    T_any = DefaultTypeVar("T_any", default=Any)
    A = TypeVar("A", bound=ActorBase)
    ActorMesh = type[A]  # as type checkers see it everywhere; `control.api.views` explains why
else:
    T_any = TypeVar("T_any")

T = TypeVar("T")


class Port(Generic[T]):
    """The sending end of a channel, or the port through which an endpoint with an explicit response port answers.

    Ports may be kept, used from any thread, and sent to other actors. An endpoint answers once; what is sent after
    that has no effect.

    Example:
        ```python
        from skipper.control import Actor, Port, endpoint, this_proc

        class Gate(Actor):
            def __init__(self) -> None:
                self.waiting: list[Port[str]] = []

            @endpoint(explicit_response_port=True)
            def wait(self, port: Port[str]) -> None:
                self.waiting.append(port)  # answered later

            @endpoint
            def open(self, word: str) -> None:
                for port in self.waiting:
                    port.send(word)

        gate = this_proc().spawn("gate", Gate)
        answer = gate.wait.call_one()
        gate.open.call_one("sesame").get()
        print(answer.get())  # sesame
        ```
    """

    def __init__(self, address: ReplyAddress, is_answer: bool = False, *, owed: bool = False) -> None:
        self._address = address
        self._is_answer = is_answer
        self._owed = owed

    @property
    def receiver(self) -> str:
        """Name of the process that receives what is sent."""
        return self._address.process.name

    def send(self, value: T) -> None:
        """Send a value; it arrives after those that this process has sent before.

        Raises:
            PayloadError: the value cannot be pickled.
        """
        self._send(Kind.REPLY if self._is_answer else Kind.VALUE, pack(value, lend=True, name="what was sent"))

    def exception(self, error: BaseException) -> None:
        """Send an error; the receiver raises it as `ActorError`, with this error as its cause."""
        here = running.current().me.name
        self._send(Kind.FAILURE, pack_exception(error, actor_id=here, endpoint="port"))

    def link(self, actors: ActorMesh[Any] | None = None) -> None:
        """Link the port to actors: a receive raises `LinkError` when every linked actor is dead.

        Any code that has the port may link it. What an actor sends before it fails or stops is received first; what was
        in flight when its process died may be lost.

        Args:
            actors: a mesh or slice; None is the actor whose code runs.
        """
        self._link(_refs(actors), ())

    def unlink(self, actors: ActorMesh[Any] | None = None) -> None:
        """Undo `link`. On a port without links, a receive waits for its whole timeout."""
        self._link((), _refs(actors))

    def relink(self, previous: ActorMesh[Any], actors: ActorMesh[Any] | None = None) -> None:
        """Link ``actors`` in place of ``previous``, in one step."""
        self._link(_refs(actors), _refs(previous))

    def _link(self, add: Sequence[ActorRef], remove: Sequence[ActorRef]) -> None:
        if not self._address.number:
            return  # nobody waits there
        address = self._address
        message = LINK.message((tuple(add), tuple(remove)), target=address.number, rank=address.rank)
        running.current().send(address.process, message)

    def _send(self, kind: Kind, payload: Payload) -> None:
        self._owed = False
        if self._address.number:
            running.current().send_to_port(self._address, kind, payload, is_answer=self._is_answer)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._is_answer and _here.passed is not None:
            _here.passed.setdefault(self, self._owed)
        self._owed = False
        return (Port, (self._address, self._is_answer))

    def __del__(self) -> None:
        # The caller waits for an answer that can no longer come: an error ends that wait.
        if _owes(self):
            self._send(Kind.FAILURE, pack_dropped("the answer will not come: the actor has dropped the response port"))


def refuse_for(port: Port[Any], reason: str, failure: MeshFailure | None) -> None:
    """Answer in place of an actor that has ended, unless it has answered, or has passed the port on."""
    if _owes(port):
        port._send(Kind.FAILURE, pack_supervision(f"the answer will not come: {reason}", failure))


def _owes(port: Port[Any]) -> bool:
    return port._owed and running.is_running()


def answer_by_error(port: Port[Any], packed: Payload) -> None:
    """Send an error that is packed already, for instance with the name of another actor than this one."""
    port._send(Kind.FAILURE, packed)


class _Here(threading.local):
    passed: dict[Port[Any], bool] | None = None
    """The response ports among the arguments that this thread is pickling, and whether each still owed its answer."""


_here = _Here()


def pack_with_ports(args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[Payload, list[Port[Any]]]:
    """`pack_arguments`, and the ports among the arguments at which an answer is awaited.

    Raises:
        PayloadError: an argument cannot be pickled.
    """
    if (pickled := pickle_arguments(args, kwargs)) is not None:
        return (pickled,), []  # there is no port among plain values
    passed: dict[Port[Any], bool] = {}
    _here.passed = passed
    try:
        return pack_arguments(args, kwargs), list(passed)
    except PayloadError:
        for port, owed in passed.items():  # they are not sent
            port._owed = owed
        raise
    finally:
        _here.passed = None


class PortReceiver(Generic[T]):
    """The receiving end of a channel, in the process that opened it.

    Attributes:
        port: the sending end; `Port.link` links it, and so this receiver, to actors.

    Example:
        ```python
        from skipper.control import Channel, DeadlineError

        port, receiver = Channel[str].open()
        port.send("a value")
        print(receiver.recv().get(timeout=10))  # a value
        try:
            receiver.recv().get(timeout=0.1)
        except DeadlineError:  # a TimeoutError
            print("nothing came")
        ```
    """

    def __init__(self, inbox: Inbox, port: Port[T]) -> None:
        self.port = port
        self._inbox = inbox

    def recv(self) -> Future[T]:
        """The next value: ``await`` it, or ``get`` it with a timeout. Values come in the order of their arrival.

        Raises (from the future):
            ActorError: the sender sent an exception.
            ChannelClosedError: the channel was closed and everything that had arrived has been received.
            LinkError: the port is linked to actors, all of them are dead, and everything has been received.
        """
        promise: Promise[T] = self._inbox.take()
        promise.hold(self)  # the receiver closes when it is deleted: a pending receive keeps it alive
        return promise

    def is_alive(self) -> bool:
        """Whether a value may still come: the channel is open, and a linked actor is alive, if any is linked."""
        return self._inbox.is_alive()

    def close(self) -> None:
        """Close the channel: pending and later receives raise `ChannelClosedError`. May be called again."""
        self._inbox.close()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a receiver cannot leave the process that opened the channel: send the port instead")


class Channel(Generic[T_any]):
    """A channel into this process, for one receiver and any number of senders: ``Channel[int].open()``.

    Example:
        ```python
        from skipper.control import Actor, Channel, Port, endpoint, this_host

        class Source(Actor):
            @endpoint
            def count_to(self, last: int, port: Port[int]) -> None:
                for number in range(1, last + 1):
                    port.send(number)

        source = this_host().spawn_procs().spawn("source", Source)
        port, receiver = Channel[int].open()
        source.count_to.broadcast(2, port)
        print(receiver.recv().get(timeout=10), receiver.recv().get(timeout=10))  # 1 2
        ```
    """

    @classmethod
    def open(cls, once: bool = False) -> tuple[Port[T_any], PortReceiver[T_any]]:
        """A port for senders and the receiver for what they send; the channel closes when the receiver is deleted.

        Args:
            once: close the channel after the first value, or exception, that comes.
        """
        _, port, receiver = open_channel(once=once)
        return port, receiver


def open_channel(*, once: bool = False) -> tuple[Inbox, Port[Any], PortReceiver[Any]]:
    """A channel, and its inbox, into which this process can put values itself."""
    process = running.current()
    inbox = Inbox(once)
    number = process.ports.open(inbox)
    inbox.attach(process.ports, number)
    port: Port[Any] = Port(ReplyAddress(process.me, number, 0))
    receiver: PortReceiver[Any] = PortReceiver(inbox, port)
    weakref.finalize(receiver, inbox.close).atexit = False
    return inbox, port, receiver


def link_port(port: Port[Any], actors: Sequence[ActorRef]) -> None:
    """Tie a port to the lives of actors (see `Port.link`)."""
    port._link(actors, ())


class Inbox:
    """Matches the values that arrive with the receives that wait for them."""

    def __init__(self, once: bool) -> None:
        self._once = once
        self._ports: Ports | None = None
        self._number = 0
        self._lock = threading.Lock()
        self._arrived: deque[Callable[[], Any]] = deque()
        # Weak, so that a receive that timed out and was deleted does not swallow the next value.
        self._waiting: deque[weakref.ref[Promise[Any]]] = deque()
        self._closed = False

    def deliver(self, rank: int, kind: Kind, payload: Payload) -> bool:
        """Take a value, or an exception."""
        if self._once:
            with self._lock:
                if self._closed:
                    return True
                self._closed = True
        self.push(lambda: open_reply(kind, payload))
        if self._once:
            self._end_waits(ChannelClosedError(self._why_closed()))
        return self._closed

    def process_lost(self, process_id: str, loss: Loss) -> bool:
        """Nothing ends here: any process may send."""
        return False

    def entrust(self, rank: int) -> None:
        """Nothing to do: it depends on no process."""

    def lapse(self, rank: int, error: LinkError) -> bool:
        """End the pending receives: every linked actor is dead."""
        self._end_waits(error)
        return False

    def attach(self, ports: Ports, number: int) -> None:
        """Note the port of this inbox."""
        self._ports, self._number = ports, number

    def _link_error(self) -> LinkError | None:
        return None if self._ports is None else self._ports.link_error(self._number)

    def is_alive(self) -> bool:
        """Whether a value may still come."""
        return not self._closed and self._link_error() is None

    def take(self) -> Promise[Any]:
        """The next value."""
        future: Promise[Any] = Promise()
        with self._lock:
            if self._arrived:
                opened = self._arrived.popleft()
            elif self._closed:
                opened = raising(ChannelClosedError(self._why_closed()))
            else:
                self._waiting.append(weakref.ref(future))
                opened = None
        if opened is not None:
            future.settle_by(opened)
        elif (error := self._link_error()) is not None:
            self._end_waits(error)
        return future

    def close(self) -> None:
        """Take nothing more; may be called again."""
        with self._lock:
            self._closed = True
        self._end_waits(ChannelClosedError(self._why_closed()))
        if self._ports is not None:
            self._ports.close(self._number)

    def _why_closed(self) -> str:
        return (
            "the channel was opened for one value, which was received, or it was closed before"
            if self._once
            else "the channel is closed"
        )

    def _end_waits(self, error: ControlError) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, deque()
        for reference in waiting:
            if (future := reference()) is not None:
                future.set_exception(error)

    def push(self, opened: Callable[[], Any]) -> None:
        """Take a value: a function returns it, or raises the error."""
        with self._lock:
            future = None
            while self._waiting and future is None:
                future = self._waiting.popleft()()
            if future is None:
                self._arrived.append(opened)
                return
        future.settle_by(opened)


class _Members(Protocol):
    def _actors(self) -> list[ActorRef]:
        """The actors of the mesh, one by one."""


def _refs(actors: ActorMesh[Any] | None) -> list[ActorRef]:
    if actors is None:
        return [local_actor(context().actor_instance).ref]
    return cast("_Members", actors)._actors()
