"""`Messenger`: sends all messages of a process, and takes those that arrive for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

from skipper.control.model import forked
from skipper.control.model import settings as bounds
from skipper.control.model.errors import BackpressureError, PayloadError
from skipper.control.model.future import Future, Promise
from skipper.control.runtime.messages import Loss, Mail, ReplyAddress
from skipper.control.runtime.ports import Acknowledgements, Awaited, OneReply, PortTable
from skipper.control.wire.addresses import host_of
from skipper.control.wire.messages import (
    ANSWERS,
    NOTICE,
    Answer,
    Call,
    Credit,
    Kind,
    LoanReturned,
    Message,
    OfTree,
    Payload,
    ProcessRequest,
)
from skipper.control.wire.payload import in_full
from skipper.control.wire.process_ref import ProcessRef

if TYPE_CHECKING:
    from skipper.control.runtime.actor_table import ActorTable
    from skipper.control.runtime.cast.sender import CastSender
    from skipper.control.runtime.flow_control import Flow
    from skipper.control.runtime.peer_failures import PeerFailures
    from skipper.control.runtime.process_state import ProcessState
    from skipper.control.runtime.request_server import RequestServer
    from skipper.control.runtime.requests import Request
    from skipper.control.wire.bulk import Loans
    from skipper.control.wire.transport import Transport

A = TypeVar("A")
R = TypeVar("R")


class Messenger:
    """What a process sends and receives. For any thread.

    Args:
        state: of this process.
        ports: where answers arrive.
        loans: the large segments that others may still read.
    """

    def __init__(self, state: ProcessState, ports: PortTable, loans: Loans) -> None:
        self.ports = ports
        self._state = state
        self._me = state.me
        self._id = state.me.id
        self._loans = loans
        self._is_beyond = False
        """Whether other hosts reach this process."""

    def connect(
        self,
        *,
        transport: Transport,
        flow: Flow,
        casts: CastSender,
        actors: ActorTable,
        requests: RequestServer,
        peer_failures: PeerFailures,
    ) -> None:
        """Take the parts that messages go to, whose construction needs the messenger. Nothing is sent before."""
        self._transport = transport
        self._flow = flow
        self._casts = casts
        self._relays = casts.relays
        self._actors = actors
        self._requests = requests
        self._peer_failures = peer_failures
        self.note_address()

    def note_address(self) -> None:
        """Note where this process can be reached, as its state says."""
        self._me = self._state.me
        self._is_beyond = bool(host_of(self._state.me.address))

    # Sending

    def cast(self, members: tuple[ProcessRef, ...], call: Call) -> None:
        """Send a message for an actor to every member of a mesh, each with its rank; down a tree if they are many.

        Raises:
            BackpressureError: a member's mailbox had no room in time; the members behind it have not been sent
                anything.
            PayloadError: a large segment cannot be lent.
        """
        if len(members) > bounds.settings().tree_threshold:
            try:
                if self._casts.cast(members, call):
                    return
            except BackpressureError:
                self._abandon(call)
                raise
        for rank, member in enumerate(members):
            self.send(member, call.for_rank(rank))

    def pass_on(self, to: ProcessRef, message: OfTree) -> bool:
        """Post a message that belongs to a tree; False, and nothing happens, if ``to`` is lost.

        `CastSender` and `Relays` handle the consequences.
        """
        link = self._transport.find(to.id) or self._transport.link(to)
        if link.lost is not None:
            return False
        link.post(message)
        return True

    def send(self, to: ProcessRef, message: Message, *, is_value: bool = False) -> None:
        """Send a message; from any thread. If ``to`` is lost, the caller that waits for its answer is told.

        Returns at once, except that calls wait while the actor is too far behind.

        Args:
            to: the process.
            message: for it, or for an actor there.
            is_value: whether it is for a port, and later casts must stay behind it.

        Raises:
            BackpressureError: the actor's mailbox had no room for a call in time; it has not been sent.
            PayloadError: a large segment cannot be lent; the message has not been sent.
        """
        if is_call := isinstance(message, Call):
            try:
                self._flow.admit(to, message)
            except BackpressureError:
                self._abandon(message)
                raise
        payload = message.payload
        may_lend = len(payload) > 1 or bool(payload and type(payload[0]) is not bytes)
        if to.id == self._id:
            if may_lend:
                self._loans.complete(payload)
            self.deliver(self._me, message)
            return
        link = self._transport.find(to.id)
        if link is None:
            if to.job != self._me.job:
                reason = f"process {to.name} belongs to a job that has ended"
                self._peer_failures.tell(to, message, Loss(reason))
                return
            link = self._transport.link(to)
        if may_lend:
            self._lend(to, message)
        if is_call:
            self._relays.speaks_to(to.id)
        is_ordered = is_call or is_value or isinstance(message, ProcessRequest)
        if is_ordered and self._casts.are_used:
            self._casts.post(link, message)
        elif link.lost is None:
            link.post(message)
            if is_ordered and self._casts.are_used:  # since just now
                self._casts.stay_behind(link)
        if may_lend:
            self._loans.complete(message.payload)
        if link.lost is not None:
            self._loans.forget(to.id)
            self._peer_failures.sent_in_vain(to, link.lost, message)

    def _lend(self, to: ProcessRef, message: Message) -> None:
        if (self._is_beyond or not to.address.startswith("unix")) and self._transport.is_elsewhere(to):
            message.payload = in_full(message.payload)
            return
        try:
            self._loans.lend(message.payload, to.id)
        except PayloadError:
            if isinstance(message, Call):
                self._flow.withdraw(to, message)
            self._abandon(message)
            raise

    def _abandon(self, message: Message) -> None:
        """Close the port of a call that is not sent. A broadcast's port stays: its sender uses it for others."""
        if isinstance(message, Call | ProcessRequest) and message.reply_to < NOTICE:
            self.ports.close(message.reply_to)

    def reply(self, mail: Mail, kind: Kind, payload: Payload) -> None:
        """Answer a message for an actor."""
        message, sender = mail.message, mail.sender
        if mail.cast is not None and self._casts.reply(mail, kind, payload):
            return
        link = self._transport.find(sender.id)
        if link is None or len(payload) != 1 or type(payload[0]) is not bytes:
            self.reply_to(sender, message, kind, payload)
        elif message.reply_to:  # as in `send`, without the steps for other messages
            answer = ANSWERS[kind](message.reply_to, message.rank, payload=payload)
            if link.lost is None:
                link.post(answer)
            if link.lost is not None:
                self._peer_failures.sent_in_vain(sender, link.lost, answer)

    def reply_to(self, sender: ProcessRef, message: Call | ProcessRequest, kind: Kind, payload: Payload) -> None:
        """Answer a message, if its sender wants that."""
        if message.reply_to:
            self.send(sender, ANSWERS[kind](message.reply_to, message.rank, payload=payload))

    def send_to_port(self, address: ReplyAddress, kind: Kind, payload: Payload, *, is_answer: bool) -> None:
        """Send to a port of any process, as an answer or as a value."""
        if not is_answer:
            self._relays.speaks_to(address.process.id)
        self.send(address.process, ANSWERS[kind](address.number, address.rank, payload=payload), is_value=True)

    @overload
    def request(self, to: ProcessRef, request: Request[None, R], *, target: int = 0) -> Future[R]: ...
    @overload
    def request(self, to: ProcessRef, request: Request[A, R], argument: A, *, target: int = 0) -> Future[R]: ...
    def request(
        self, to: ProcessRef, request: Request[Any, Any], argument: Any = None, *, target: int = 0
    ) -> Future[Any]:
        """Ask a process for something that it answers with a value (see `control.runtime.requests`)."""
        payload = request.pack(argument)
        reply: OneReply[Any] = OneReply(Awaited(to, f"process {to.name}", request.name, request=request))
        port = self.ports.open_owed(reply)
        self.send(to, ProcessRequest(target, port, 0, request.name, payload=payload))
        return reply

    @overload
    def request_all(
        self, to: Sequence[ProcessRef], request: Request[None, None], *, target: int = 0
    ) -> Promise[None]: ...
    @overload
    def request_all(
        self, to: Sequence[ProcessRef], request: Request[A, None], argument: A, *, target: int = 0
    ) -> Promise[None]: ...
    def request_all(
        self, to: Sequence[ProcessRef], request: Request[Any, None], argument: Any = None, *, target: int = 0
    ) -> Promise[None]:
        """Ask processes for something that they acknowledge; processes that are gone count as having done it.

        Returns:
            A promise, which the caller may end sooner.
        """
        promise: Promise[None] = Promise()
        payload = request.pack(argument)
        port = self.ports.open(Acknowledgements(promise, [process.id for process in to]))
        for rank, process in enumerate(to):
            self.send(process, ProcessRequest(target, port, rank, request.name, payload=payload))
        return promise

    def fall_silent(self) -> None:
        """Send nothing any more: this is a forked copy, and the connections belong to the original."""

        def refuse(*args: object) -> None:
            forked.check()

        self._transport.fall_silent()
        for name in ("send", "cast", "pass_on"):
            setattr(self, name, refuse)

    # Receiving

    def deliver(self, sender: ProcessRef, message: Message) -> None:
        """Take a message that has arrived: on the thread of its stream, or on any thread if this process sent it."""
        if isinstance(message, Answer):
            self.ports.deliver(message.port, message.rank, message.kind, message.payload)
            if message.sequence:
                self._relays.arrive(sender, message)
        elif isinstance(message, Call):
            if message.sequence:
                self._relays.arrive(sender, message)
            else:
                self._actors.deliver(Mail(sender, message))
        elif isinstance(message, ProcessRequest):
            if message.sequence:
                self._relays.arrive(sender, message)
            else:
                self._requests.handle(sender, message)
        elif isinstance(message, Credit):
            self._flow.credit(sender, message)
        elif isinstance(message, LoanReturned):
            self._loans.give_back(message.loan, sender.id, is_readable=message.is_readable)
        elif isinstance(message, OfTree):
            self._casts.take(sender, message)
