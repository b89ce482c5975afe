"""`Process`: the runtime of this process. Everything that is sent leaves through `Process.send`."""

from __future__ import annotations

import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from control import settings as bounds
from control.errors import BackpressureError, ControlError, PayloadError
from control.failure import MeshFailure
from control.future import Future
from control.runtime.launcher import WorkerConfig
from control.runtime.messages import Loss, Mail, OwnerRef
from control.runtime.obituaries import Obituaries
from control.runtime.ports import Acknowledgements, Awaited, OneReply, PortTable
from control.runtime.supervision import Owner, RootCell, failures_of, mesh_of
from control.wire.envelope import NOTICE, STOPPED, Envelope, Kind, Payload, ProcessRef
from control.wire.payload import pack

if TYPE_CHECKING:
    from control.port import ReplyAddress
    from control.runtime.binding import Binding
    from control.runtime.children import Child
    from control.runtime.loop import LoopThread
    from control.runtime.supervision import OwnedMesh

START_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 5.0
KILL_TIMEOUT_S = 5.0


class Process:
    """One process of a job: its transport, its actors, its open ports and its children.

    Args:
        me: this process.
        root: the script; the same as ``me`` there.
        secret: the job's secret.
        loop_thread: what everything asynchronous runs on.
    """

    def __init__(self, me: ProcessRef, root: ProcessRef, secret: bytes, loop_thread: LoopThread) -> None:
        from control.runtime.agent import Agent
        from control.runtime.children import Children
        from control.runtime.flow import Flow
        from control.runtime.mailbox import CellTable
        from control.wire import engine
        from control.wire.bulk import Loans

        engine.choose()  # before the transport imports gRPC
        from control.wire.transport import Transport

        self.me = me
        self.root = root
        self.secret = secret
        self.settings = bounds.settings()
        self.ports = PortTable()
        self.root_cell: RootCell | None = None
        self.uid = secrets.randbits(63)
        self.closing = False
        self._loop = loop_thread.loop
        self._loop_thread = loop_thread
        self.cells = CellTable(self, self._loop)
        self.flow = Flow(self, loop_thread)
        self.loans = Loans()
        self.agent = Agent(self)
        self.children = Children(self._loop, self._child_ended, connect_timeout_s=self.settings.connect_timeout_s)
        self._obituaries = Obituaries(self._forget)
        self.transport = Transport(
            me,
            secret,
            self._loop,
            deliver=self.deliver,
            on_lost=self._link_lost,
            on_connected=lambda peer: self.children.connected(peer.id),
            on_dial=self._watch_from_afar,
            heartbeat_s=self.settings.heartbeat_s,
            connect_timeout_s=self.settings.connect_timeout_s,
        )
        loop_thread.run(self.transport.start(), timeout=START_TIMEOUT_S)

    # Sending

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
            self.deliver(self.me, envelope)
            return
        link = self.transport.find(to.id)
        if link is None:
            if to.job != self.me.job:
                self._tell_of_loss(to, envelope, Loss(f"process {to.name} belongs to a job that has ended"))
                return
            link = self.transport.link(to)
        if envelope.payload:
            self._lend(to, envelope)
        if link.lost is None:
            link.post(envelope)
        if link.lost is not None:
            self.loans.forget(to.id)
            self._send_was_vain(to, link.lost, envelope)

    def _lend(self, to: ProcessRef, envelope: Envelope) -> None:
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

    def _send_was_vain(self, to: ProcessRef, reason: str, envelope: Envelope) -> None:
        obituary = self._obituaries.get(to.id)
        child = self.children.get(to.id)
        if obituary is None and child is not None and envelope.reply_to < NOTICE:
            return  # its end is about to be seen, with a better reason, and whoever waits is told then
        in_good_order = reason == STOPPED or (child is not None and child.expected)
        self._tell_of_loss(to, envelope, obituary or Loss.of(to, reason, in_good_order=in_good_order))

    def _tell_of_loss(self, to: ProcessRef, envelope: Envelope, loss: Loss) -> None:
        if envelope.kind is Kind.CALL and envelope.reply_to >= NOTICE:
            self.ports.undelivered(envelope.reply_to, loss)
        else:
            self.ports.process_lost(to.id, loss)

    def reply(self, mail: Mail, kind: Kind, payload: Payload) -> None:
        """Answer a message for an actor."""
        self.reply_to(mail.sender, mail.envelope, kind, payload)

    def reply_to(self, sender: ProcessRef, envelope: Envelope, kind: Kind, payload: Payload) -> None:
        """Answer an envelope, if its sender wants that."""
        if envelope.reply_to:
            self.send(sender, Envelope(kind, envelope.reply_to, payload, rank=envelope.rank))

    def send_to_port(self, address: ReplyAddress, kind: Kind, payload: Payload) -> None:
        """Send to a port of any process."""
        self.send(address.process, Envelope(kind, address.number, payload, rank=address.rank))

    def request(self, to: ProcessRef, method: str, payload: Payload, *, target: int = 0) -> Future[Any]:
        """Ask a process for something (see `Agent`) that it answers with a value."""
        future: Future[Any] = Future()
        port = self.ports.open(OneReply(future, Awaited(to.id, to.name, method)))
        self.send(to, Envelope(Kind.AGENT, target, payload, method, port))
        return future

    def request_all(self, to: tuple[ProcessRef, ...], method: str, *, target: int = 0) -> Future[None]:
        """Ask processes for something that they acknowledge; those that are gone count as having done it."""
        future: Future[None] = Future()
        port = self.ports.open(Acknowledgements(future, [process.id for process in to]))
        for rank, process in enumerate(to):
            self.send(process, Envelope(Kind.AGENT, target, (), method, port, rank))
        return future

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
        path = tuple(sys.path)
        configs = [
            WorkerConfig(member, self.me, self.root, self.secret, path, self.settings, bootstrap, binding)
            for member, binding in zip(members, bindings, strict=True)
        ]
        self.children.launch(configs, env)

    def stop_children(self, members: Sequence[ProcessRef]) -> Future[None]:
        """Ask children to end, kill those that have not after the stop timeout; the future ends with the last."""
        children = [child for member in members if (child := self.children.get(member.id)) is not None]
        future: Future[None] = Future()
        missing = {child.ref.id for child in children}

        def ended(child: Child) -> None:
            missing.discard(child.ref.id)
            if not missing:
                future._settle(lambda: None)

        if not children:
            future._settle(lambda: None)
        for child in children:
            self.children.expect_end(child.ref.id)
            if not child.gone:
                self.send(child.ref, Envelope(Kind.AGENT, method="exit"))
            child.ended.add_done_callback(lambda _, child=child: ended(child))  # type: ignore[misc]
        verdict = f"was killed because it did not stop within {self.settings.stop_timeout_s:g} s"
        self._loop.call_soon_threadsafe(
            self._loop.call_later, self.settings.stop_timeout_s, self.children.kill, list(missing), verdict
        )
        return future

    # Receiving

    def deliver(self, sender: ProcessRef, envelope: Envelope) -> None:
        """Take an envelope that has arrived: on the loop thread from elsewhere, on any thread from this process."""
        if envelope.kind is Kind.CALL:
            self.cells.deliver(Mail(sender, envelope))
        elif envelope.kind is Kind.AGENT:
            self.agent.handle(sender, envelope)
        elif envelope.kind is Kind.CREDIT:
            self.flow.credit(sender, envelope)
        elif envelope.kind is Kind.GIVE_BACK:
            self.loans.give_back(envelope.target, sender.id)
        else:
            self.ports.deliver(envelope.target, envelope.rank, envelope.kind, envelope.payload)

    # Supervision

    def owner(self, uid: int) -> Owner | None:
        """The actor of this process with this number, the script's included."""
        if self.root_cell is not None and self.root_cell.uid == uid:
            return self.root_cell
        return self.cells.get(uid)

    def disown(self, uid: int) -> None:
        """Forget a mesh that has ended, wherever in this process its owner is."""
        for owner in self._owners():
            owner.owned.pop(uid, None)
            if (number := owner.notices.pop(uid, None)) is not None:
                self.ports.close(number)

    def find_owned(self, uid: int) -> OwnedMesh | None:
        """A mesh that an actor of this process owns."""
        return mesh_of(self._owners(), uid)

    def report(self, owner: OwnerRef | None, failure: MeshFailure) -> None:
        """Bring a failure to the owner of the mesh."""
        if owner is None or self.closing:
            return
        if owner.process.id == self.me.id:
            self.deliver_failure(owner, failure)
        else:
            self.send(owner.process, Envelope(Kind.AGENT, 0, pack((owner, failure)), "failure"))

    def deliver_failure(self, owner: OwnerRef, failure: MeshFailure) -> None:
        """Take a failure for an actor of this process; void where that has ended."""
        here = self.owner(owner.uid)
        if here is not None:
            here.owned_failed(failure)

    def peer_gone(self, peer: ProcessRef, reason: str, *, in_good_order: bool) -> None:
        """Everything that follows from the end of a process: for its callers, its owners, and those it owned."""
        obituary = Loss.of(peer, reason, in_good_order=in_good_order)
        # In this order: who sends from now on finds the link lost and the obituary written, and whoever sent before
        # has a port that is told here.
        self._obituaries.write(peer.id, obituary)
        self.transport.lose(peer, reason)
        self.ports.process_lost(peer.id, obituary)
        if (link := self.transport.find(peer.id)) is not None:
            unsent, link.unsent = link.unsent, []
            for envelope in unsent:
                self._tell_of_loss(peer, envelope, obituary)
        self.flow.forget(peer)
        self.loans.forget(peer.id)
        if self.closing:
            return
        for cell in self.cells.live():
            if cell.owner is not None and cell.owner.process.id == peer.id:
                cell.orphan(f"the owner's {obituary.reason}")
        if not in_good_order:
            for owner, failure in failures_of(self._owners(), peer, obituary):
                owner.owned_failed(failure)
        for owner in self._owners():
            for mesh in list(owner.owned.values()):
                if all(member.id in self._obituaries for member in mesh.root_members):
                    owner.owned.pop(mesh.uid, None)

    def _forget(self, process_id: str) -> None:
        self.transport.forget(process_id)
        self.children.forget(process_id)

    def _owners(self) -> list[Owner]:
        owners: list[Owner] = list(self.cells.live())
        return owners if self.root_cell is None else [self.root_cell, *owners]

    def _watch_from_afar(self, peer: ProcessRef) -> None:
        """Have a process that we dial watched by its launcher: it may have died before it could be reached."""
        if peer.launcher is None or peer.id == self.root.id:
            return
        obituary: Future[str] = self.request(peer.launcher, "obituary", pack(peer.id))

        def told(answer: Future[str]) -> None:
            try:
                reason = answer.get(0)
            except ControlError as error:
                reason = f"its launcher is gone, too: {error}"
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self.transport.lose, peer, reason)

        obituary.add_done_callback(told)

    def _link_lost(self, peer: ProcessRef, reason: str) -> None:
        if not self.children.link_lost(peer.id, reason):
            self.peer_gone(peer, reason, in_good_order=reason == STOPPED)

    def _child_ended(self, child: Child, reason: str) -> None:
        self.peer_gone(child.ref, reason, in_good_order=child.expected)

    # The end

    def shutdown(self, *, grace_s: float) -> None:
        """Stop what the script owns, in good order where that takes no longer than ``grace_s``; then leave the job."""
        if self.closing:
            return
        deadline = time.monotonic() + grace_s
        if self.root_cell is not None:
            self.root_cell.stop_owned(deadline)
        self.closing = True
        self._stop_cells(deadline)
        children = self.children.alive()
        self.children.kill([child.ref.id for child in children], "was killed because the script ends")
        for child in children:
            child.ended.get(KILL_TIMEOUT_S)
        self.children.close()
        self.loans.clear()
        self._loop_thread.run(self.transport.close(), timeout=CLOSE_TIMEOUT_S)

    def exit_in_good_order(self, acknowledge: Callable[[], None]) -> None:
        """End a worker process: its actors first. Returns at once."""
        threading.Thread(target=self._exit, args=(acknowledge,), name="control-exit", daemon=True).start()

    def _exit(self, acknowledge: Callable[[], None]) -> None:
        self._stop_cells(time.monotonic() + self.settings.stop_timeout_s)
        self.closing = True
        acknowledge()
        self._loop_thread.run(self.transport.close(), timeout=CLOSE_TIMEOUT_S)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _stop_cells(self, deadline: float) -> None:
        ends = [self.cells.stop(cell.uid) for cell in reversed(self.cells.live())]
        for end in ends:
            try:
                end.get(max(deadline - time.monotonic(), 0))
            except ControlError:
                continue  # it did not end in time, or its cleanup raised, which was logged: the process ends anyway
