"""`Messenger`: what a process sends leaves through it, and what comes for the process arrives there."""

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
from skipper.control.wire.envelope import NOTICE, Envelope, Kind, Payload, ProcessRef
from skipper.control.wire.payload import in_full

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

_OF_TREES = frozenset({Kind.CAST, Kind.GATHER, Kind.TREE})


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
        """Take the parts that messages go to, which need the messenger to be made. Nothing is sent before."""
        self._transport = transport
        self._flow = flow
        self._casts = casts
        self._relays = casts.relays
        self._actors = actors
        self._requests = requests
        self._peer_failures = peer_failures
        self.note_address()

    def note_address(self) -> None:
        """Note where this process is reached, as its state says."""
        self._me = self._state.me
        self._is_beyond = bool(host_of(self._state.me.address))

    # Sending

    def cast(self, members: tuple[ProcessRef, ...], envelope: Envelope) -> None:
        """Send a message for an actor to every member of a mesh, each with its rank; down a tree where they are many.

        Raises:
            BackpressureError: a member's mailbox found no room in time; those behind it have not been sent anything.
            PayloadError: a large segment cannot be lent.
        """
        if len(members) > bounds.settings().tree_threshold:
            try:
                if self._casts.cast(members, envelope):
                    return
            except BackpressureError:
                self._abandon(envelope)
                raise
        for rank, member in enumerate(members):
            self.send(member, envelope.for_rank(rank))

    def pass_on(self, to: ProcessRef, envelope: Envelope) -> None:
        """Post an envelope that belongs to a tree; nothing happens where ``to`` is lost: `CastSender` sees to that."""
        link = self._transport.find(to.id) or self._transport.link(to)
        if link.lost is None:
            link.post(envelope)

    def send(self, to: ProcessRef, envelope: Envelope, *, is_value: bool = False) -> None:
        """Send an envelope; from any thread. If ``to`` is lost, whoever waits for its answer is told.

        Returns at once, except that calls wait while the actor is too far behind.

        Args:
            to: the process.
            envelope: for it, or for an actor there.
            is_value: whether it is for a port, and what is cast later stays behind it.

        Raises:
            BackpressureError: a call found no room in the actor's mailbox in time; it has not been sent.
            PayloadError: a large segment cannot be lent; the envelope has not been sent.
        """
        if envelope.kind is Kind.CALL:
            try:
                self._flow.admit(to, envelope)
            except BackpressureError:
                self._abandon(envelope)
                raise
        if to.id == self._id:
            self._loans.complete(envelope.payload)
            self.deliver(self._me, envelope)
            return
        link = self._transport.find(to.id)
        if link is None:
            if to.job != self._me.job:
                reason = f"process {to.name} belongs to a job that has ended"
                self._peer_failures.tell(to, envelope, Loss(reason))
                return
            link = self._transport.link(to)
        if envelope.payload:
            self._lend(to, envelope)
        if envelope.kind is Kind.CALL:
            self._relays.speaks_to(to.id)
        is_ordered = is_value or envelope.kind is Kind.CALL or envelope.kind is Kind.AGENT
        if is_ordered and self._casts.are_used:
            self._casts.post(link, envelope)
        elif link.lost is None:
            link.post(envelope)
            if is_ordered and self._casts.are_used:  # since this very moment
                self._casts.stay_behind(link)
        self._loans.complete(envelope.payload)
        if link.lost is not None:
            self._loans.forget(to.id)
            self._peer_failures.sent_in_vain(to, link.lost, envelope)

    def _lend(self, to: ProcessRef, envelope: Envelope) -> None:
        if (self._is_beyond or not to.address.startswith("unix")) and self._transport.is_elsewhere(to):
            envelope.payload = in_full(envelope.payload)
            return
        try:
            self._loans.lend(envelope.payload, to.id)
        except PayloadError:
            self._flow.withdraw(to, envelope)
            self._abandon(envelope)
            raise

    def _abandon(self, envelope: Envelope) -> None:
        """Close the port of a call that is not sent; that of a broadcast is its sender's, for all its broadcasts."""
        if envelope.reply_to < NOTICE:
            self.ports.close(envelope.reply_to)

    def reply(self, mail: Mail, kind: Kind, payload: Payload) -> None:
        """Answer a message for an actor."""
        if mail.cast is None or not self._casts.reply(mail, kind, payload):
            self.reply_to(mail.sender, mail.envelope, kind, payload)

    def reply_to(self, sender: ProcessRef, envelope: Envelope, kind: Kind, payload: Payload) -> None:
        """Answer an envelope, if its sender wants that."""
        if envelope.reply_to:
            self.send(sender, Envelope(kind, envelope.reply_to, payload, rank=envelope.rank))

    def send_to_port(self, address: ReplyAddress, kind: Kind, payload: Payload, *, is_answer: bool) -> None:
        """Send to a port of any process, as an answer or for its own sake."""
        if not is_answer:
            self._relays.speaks_to(address.process.id)
        self.send(address.process, Envelope(kind, address.number, payload, rank=address.rank), is_value=True)

    @overload
    def request(self, to: ProcessRef, request: Request[None, R], *, target: int = 0) -> Future[R]: ...
    @overload
    def request(self, to: ProcessRef, request: Request[A, R], argument: A, *, target: int = 0) -> Future[R]: ...
    def request(
        self, to: ProcessRef, request: Request[Any, Any], argument: Any = None, *, target: int = 0
    ) -> Future[Any]:
        """Ask a process for something that it answers with a value (see `control.runtime.requests`)."""
        payload = request.pack(argument)
        future: Promise[Any] = Promise()
        port = self.ports.open(OneReply(future, Awaited(to, f"process {to.name}", request.name, request=request)))
        self.send(to, Envelope(Kind.AGENT, target, payload, request.name, port))
        return future

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
        """Ask processes for something that they acknowledge; those that are gone count as having done it.

        Returns:
            A promise, which whoever asks may end sooner.
        """
        promise: Promise[None] = Promise()
        payload = request.pack(argument)
        port = self.ports.open(Acknowledgements(promise, [process.id for process in to]))
        for rank, process in enumerate(to):
            self.send(process, Envelope(Kind.AGENT, target, payload, request.name, port, rank))
        return promise

    def fall_silent(self) -> None:
        """Send nothing any more: this is a forked copy, and the connections are those of the original."""

        def refuse(*args: object) -> None:
            forked.check()

        self._transport.fall_silent()
        for name in ("send", "cast", "pass_on"):
            setattr(self, name, refuse)

    # Receiving

    def deliver(self, sender: ProcessRef, envelope: Envelope) -> None:
        """Take an envelope that has arrived: on the thread of its stream, or on any thread from this process."""
        if envelope.sequence and (envelope.kind is Kind.CALL or envelope.kind is Kind.AGENT):
            self._relays.arrive(sender, envelope)
        elif envelope.kind is Kind.CALL:
            self._actors.deliver(Mail(sender, envelope))
        elif envelope.kind is Kind.AGENT:
            self._requests.handle(sender, envelope)
        elif envelope.kind in _OF_TREES:
            self._casts.take(sender, envelope)
        elif envelope.kind is Kind.CREDIT:
            self._flow.credit(sender, envelope)
        elif envelope.kind is Kind.GIVE_BACK:
            self._loans.give_back(envelope.target, sender.id, is_readable=envelope.rank == 1)
        else:
            self.ports.deliver(envelope.target, envelope.rank, envelope.kind, envelope.payload)
            if envelope.sequence:
                self._relays.arrive(sender, envelope)
