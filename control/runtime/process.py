"""`Process`: the runtime of this process. Everything that is sent leaves through `Process.send`."""

from __future__ import annotations

import dataclasses
import secrets
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from skipper import trust
from skipper.control.model import forked
from skipper.control.model import settings as bounds
from skipper.control.model.errors import BackpressureError, PayloadError
from skipper.control.model.future import Future
from skipper.control.runtime.messages import Loss, Mail
from skipper.control.runtime.ports import Acknowledgements, Awaited, OneReply, PortTable
from skipper.control.runtime.procs.output_capture import Redirection
from skipper.control.runtime.procs.worker_config import WorkerConfig
from skipper.control.runtime.supervision import RootActor
from skipper.control.wire.addresses import host_of
from skipper.control.wire.envelope import NOTICE, Envelope, Kind, Payload, ProcessRef
from skipper.control.wire.payload import in_full, pack

if TYPE_CHECKING:
    from skipper.control.runtime.loop import LoopThread
    from skipper.control.runtime.port import ReplyAddress
    from skipper.control.runtime.procs.binding import Binding

START_TIMEOUT_S = 30.0

_OF_TREES = frozenset({Kind.CAST, Kind.GATHER, Kind.TREE})


class Process:
    """One process of a job: its transport, its actors, its open ports and its children.

    Args:
        me: this process.
        root: the script; the same as ``me`` there.
        secret: the job's secret.
        loop_thread: what everything asynchronous runs on.
        certs: the folder of the certificates for TLS with other hosts; None: none.
        data_plane_is_open: whether the data plane may be used with other hosts.
    """

    def __init__(
        self,
        me: ProcessRef,
        root: ProcessRef,
        secret: bytes,
        loop_thread: LoopThread,
        certs: str | None = None,
        *,
        data_plane_is_open: bool = True,
    ) -> None:
        from skipper.control.runtime.actor_table import ActorTable
        from skipper.control.runtime.cast.sender import CastSender
        from skipper.control.runtime.flow_control import Flow
        from skipper.control.runtime.history import History
        from skipper.control.runtime.join_members import Members
        from skipper.control.runtime.ownership import Ownership
        from skipper.control.runtime.peer_failures import PeerFailures
        from skipper.control.runtime.procs.children import Children
        from skipper.control.runtime.procs.ending import Ending
        from skipper.control.runtime.procs.remote_launch import RemoteLaunch
        from skipper.control.runtime.requests import RequestServer
        from skipper.control.runtime.stops import Stops
        from skipper.control.wire import grpc_poller
        from skipper.control.wire.bulk import Loans
        from skipper.control.wire.certificates import Certificates

        grpc_poller.choose()  # before the transport imports gRPC
        from skipper.control.wire.transport import Transport

        self.me = me
        self.root = root
        self.secret = secret
        trust.enter_job(secret)  # before any memory is registered: the data plane proves its handles by it
        self.certs = certs
        self.data_plane_is_open = data_plane_is_open
        self.settings = bounds.settings()
        self.ports = PortTable()
        self.root_actor: RootActor | None = None
        self.uid = secrets.randbits(63)
        self.closing = False
        self.history = History()
        self.redirection: Redirection | None = None
        self._loop = loop_thread.loop
        self.stops = Stops(self, self._loop)
        self.actors = ActorTable(self, self._loop)
        self.flow = Flow(self, loop_thread)
        self.loans = Loans()
        self.casts = CastSender(self, self._loop)
        self.requests = RequestServer(self)
        self.members = Members()
        self.owners = Ownership(self)
        self.ending = Ending(self, loop_thread)
        self.peer_failures = PeerFailures(self, self._loop)
        self.children = Children(self._loop, self.peer_failures.child_ended, self._ask_to_end, self.settings)
        self.remote_launch = RemoteLaunch(self, self._loop)
        self.transport = Transport(
            me,
            secret,
            self._loop,
            deliver=self.deliver,
            on_lost=self.peer_failures.link_lost,
            on_connected=self._connected,
            on_dial=self.peer_failures.watch,
            find_address=self._find_address,
            home=lambda: host_of(self.root.address),
            heartbeat_s=self.settings.heartbeat_s,
            unresponsive_s=self.settings.unresponsive(),
            connect_timeout_s=self.settings.connect_timeout_s,
            script_id=root.id,
            certificates=None if certs is None else Certificates(certs),
        )
        loop_thread.run(self.transport.start(), timeout=START_TIMEOUT_S)
        self.me = self.transport.me
        self._is_beyond = bool(host_of(self.me.address))
        """Whether other hosts reach this process."""

    def take_over(self, settings: bounds.Settings) -> None:
        """Have bounds hold for what this process does from now on; the heartbeat is the job's and stays."""
        self.settings = dataclasses.replace(settings, heartbeat_s=self.settings.heartbeat_s)
        self.children.take_over(self.settings)
        self.flow.take_over(self.settings)

    def running(self) -> list[str]:
        """The names of the processes that this one has launched, and that stand for its job on other hosts."""
        children = [child.ref.name for child in self.children.alive()]
        return [*children, *(host.name for host in self.remote_launch.hosts())]

    # Sending

    def cast(self, members: tuple[ProcessRef, ...], envelope: Envelope) -> None:
        """Send a message for an actor to every member of a mesh, each with its rank; down a tree where they are many.

        Raises:
            BackpressureError: a member's mailbox found no room in time; those behind it have not been sent anything.
            PayloadError: a large segment cannot be lent.
        """
        if len(members) > bounds.settings().tree_threshold:
            try:
                if self.casts.cast(members, envelope):
                    return
            except BackpressureError:
                self._abandon(envelope)
                raise
        for rank, member in enumerate(members):
            self.send(member, envelope.for_rank(rank))

    def pass_on(self, to: ProcessRef, envelope: Envelope) -> None:
        """Post an envelope that belongs to a tree; nothing happens where ``to`` is lost."""
        link = self.transport.find(to.id) or self.transport.link(to)
        if link.lost is None:
            link.post(envelope)

    def send(self, to: ProcessRef, envelope: Envelope) -> None:
        """Send an envelope; from any thread. If ``to`` is lost, whoever waits for its answer is told.

        Returns at once, except that calls wait while the actor is too far behind.

        Raises:
            BackpressureError: a call found no room in the actor's mailbox in time; it has not been sent.
            PayloadError: a large segment cannot be lent; the envelope has not been sent.
        """
        if envelope.kind is Kind.CALL:
            try:
                self.flow.admit(to, envelope)
            except BackpressureError:
                self._abandon(envelope)
                raise
        if to.id == self.me.id:
            self.loans.complete(envelope.payload)
            self.deliver(self.me, envelope)
            return
        link = self.transport.find(to.id)
        if link is None:
            if to.job != self.me.job:
                self.peer_failures.tell(to, envelope, Loss(f"process {to.name} belongs to a job that has ended"))
                return
            link = self.transport.link(to)
        if envelope.payload:
            self._lend(to, envelope)
        if envelope.kind is Kind.CALL:
            self.casts.relays.speaks_to(to.id)
        is_ordered = envelope.kind is Kind.CALL or envelope.kind is Kind.AGENT
        if is_ordered and self.casts.are_used:
            self.casts.post(link, envelope)
        elif link.lost is None:
            link.post(envelope)
            if is_ordered and self.casts.are_used:  # since this very moment
                self.casts.spoken_to(to.id)
        self.loans.complete(envelope.payload)
        if link.lost is not None:
            self.loans.forget(to.id)
            self.peer_failures.sent_in_vain(to, link.lost, envelope)

    def _lend(self, to: ProcessRef, envelope: Envelope) -> None:
        if (self._is_beyond or not to.address.startswith("unix")) and self.transport.is_elsewhere(to):
            envelope.payload = in_full(envelope.payload)
            return
        try:
            self.loans.lend(envelope.payload, to.id)
        except PayloadError:
            self.flow.withdraw(to, envelope)
            self._abandon(envelope)
            raise

    def _abandon(self, envelope: Envelope) -> None:
        """Close the port of a call that is not sent; that of a broadcast is its sender's, for all its broadcasts."""
        if envelope.reply_to < NOTICE:
            self.ports.close(envelope.reply_to)

    def reply(self, mail: Mail, kind: Kind, payload: Payload) -> None:
        """Answer a message for an actor."""
        if mail.cast is None or not self.casts.reply(mail, kind, payload):
            self.reply_to(mail.sender, mail.envelope, kind, payload)

    def reply_to(self, sender: ProcessRef, envelope: Envelope, kind: Kind, payload: Payload) -> None:
        """Answer an envelope, if its sender wants that."""
        if envelope.reply_to:
            self.send(sender, Envelope(kind, envelope.reply_to, payload, rank=envelope.rank))

    def send_to_port(self, address: ReplyAddress, kind: Kind, payload: Payload, *, is_answer: bool) -> None:
        """Send to a port of any process, as an answer or for its own sake."""
        if not is_answer:
            self.casts.relays.speaks_to(address.process.id)
        self.send(address.process, Envelope(kind, address.number, payload, rank=address.rank))
        if self.casts.are_used:
            self.casts.spoken_to(address.process.id)

    def request(self, to: ProcessRef, method: str, payload: Payload, *, target: int = 0) -> Future[Any]:
        """Ask a process for something (see `RequestServer`) that it answers with a value."""
        future: Future[Any] = Future()
        port = self.ports.open(OneReply(future, Awaited(to, f"process {to.name}", method, is_request=True)))
        self.send(to, Envelope(Kind.AGENT, target, payload, method, port))
        return future

    def request_all(
        self, to: tuple[ProcessRef, ...], method: str, payload: Payload = (), *, target: int = 0
    ) -> Future[None]:
        """Ask processes for something that they acknowledge; those that are gone count as having done it."""
        future: Future[None] = Future()
        port = self.ports.open(Acknowledgements(future, [process.id for process in to]))
        for rank, process in enumerate(to):
            self.send(process, Envelope(Kind.AGENT, target, payload, method, port, rank))
        return future

    def fall_silent(self) -> None:
        """Send nothing any more: this is a forked copy, and the connections are those of the original."""

        def refuse(*args: object) -> None:
            forked.check()

        self.transport.fall_silent()
        for name in ("send", "cast", "pass_on"):
            setattr(self, name, refuse)

    # Children

    def launch(
        self,
        members: Sequence[ProcessRef],
        env: Mapping[str, str],
        bootstrap: tuple[bytes, ...],
        bindings: Sequence[Binding],
    ) -> None:
        """Start child processes, each with its binding."""
        for member in members:
            self.transport.expect(member)
        path, beyond = tuple(sys.path), (self.certs, self.data_plane_is_open, self.redirection)
        configs = [
            WorkerConfig(member, self.me, self.root, self.secret, path, self.settings, bootstrap, binding, *beyond)
            for member, binding in zip(members, bindings, strict=True)
        ]
        self.children.launch(configs, env)

    def _ask_to_end(self, child: ProcessRef, timeout: float) -> None:
        self.send(child, Envelope(Kind.AGENT, 0, pack(timeout), "exit"))

    # Receiving

    def deliver(self, sender: ProcessRef, envelope: Envelope) -> None:
        """Take an envelope that has arrived: on the thread of its stream, or on any thread from this process."""
        if envelope.kind is Kind.CALL:
            if not self.casts.relays.hold(sender, envelope):
                self.actors.deliver(Mail(sender, envelope))
        elif envelope.kind is Kind.AGENT:
            if not self.casts.relays.hold(sender, envelope):
                self.requests.handle(sender, envelope)
        elif envelope.kind in _OF_TREES:
            self.casts.take(sender, envelope)
        elif envelope.kind is Kind.CREDIT:
            self.flow.credit(sender, envelope)
        elif envelope.kind is Kind.GIVE_BACK:
            self.loans.give_back(envelope.target, sender.id, is_readable=envelope.rank == 1)
        else:
            self.ports.deliver(envelope.target, envelope.rank, envelope.kind, envelope.payload)

    # Links

    def _connected(self, peer: ProcessRef) -> None:
        self.children.connected(peer.id)
        self.remote_launch.connected(peer)

    def _find_address(self, peer: ProcessRef) -> Future[str]:
        """Ask the launcher of a process of another host where it listens."""
        return self.request(peer.launcher or self.root, "address", pack(peer.id))

    def listen_beyond(self, host: str, certs: str | None) -> None:
        """Let processes of other hosts reach this one, which is the script's, at an IP of its host.

        Raises:
            WireError: it cannot be listened on.
            CertificateError: the folder does not hold what TLS needs.
        """
        from skipper.control.wire.certificates import Certificates

        self.transport.listen_beyond(host, None if certs is None else Certificates(certs))
        self.certs = certs
        self.me = self.root = self.transport.me
        self._is_beyond = True
        if self.root_actor is not None:
            self.root_actor.ref = dataclasses.replace(self.root_actor.ref, process=self.me)
