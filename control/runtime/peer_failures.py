"""`PeerFailures`: how a process learns that others have ended, and everything that follows from it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from skipper.control.model.errors import ControlError
from skipper.control.model.future import Future, peek
from skipper.control.runtime.interfaces import Requester
from skipper.control.runtime.messages import Loss, Mail
from skipper.control.runtime.requests import EXIT_REASON
from skipper.control.wire.messages import Cast, Message, is_noticed
from skipper.control.wire.process_ref import NO_SIGN_OF_LIFE, STOPPED, ProcessRef

if TYPE_CHECKING:
    from skipper.control.runtime.cast.sender import CastSender
    from skipper.control.runtime.flow_control import Flow
    from skipper.control.runtime.history import FaultHistory
    from skipper.control.runtime.join_members import JoinedProcesses
    from skipper.control.runtime.ownership import Ownership
    from skipper.control.runtime.ports import PortTable
    from skipper.control.runtime.process_state import ProcessState
    from skipper.control.runtime.procs.children import Child, Children
    from skipper.control.runtime.procs.remote_launch import RemoteLaunch
    from skipper.control.runtime.request_server import RequestServer
    from skipper.control.wire.bulk import Loans
    from skipper.control.wire.transport import Transport

EXIT_REASON_S = 1.0
"""How long this process waits, after a link to another host has broken, to learn why the other process ended."""
ORPHAN_S = 5.0
"""A process that has lost its launcher ends after this long. The launcher usually ends it before, and knows why."""

_KEPT_REASONS = 512
"""Limits the memory for lost processes: a script may start and lose processes for as long as it runs."""


class _ExitReasons:
    """Why the latest few hundred processes are gone. Written on the loop thread, read on any thread.

    Args:
        forget: called, on the loop thread, with every process of which nothing needs to be known any more.
    """

    def __init__(self, forget: Callable[[str], None]) -> None:
        self._forget = forget
        self._known: dict[str, Loss] = {}

    def __contains__(self, process_id: str) -> bool:
        return process_id in self._known

    def get(self, process_id: str) -> Loss | None:
        """Why this process is gone, if it is gone and the reason is still known."""
        return self._known.get(process_id)

    def write(self, process_id: str, loss: Loss) -> None:
        """Note the end of a process."""
        self._known[process_id] = loss
        while len(self._known) > _KEPT_REASONS:
            oldest = next(iter(self._known))
            del self._known[oldest]
            self._forget(oldest)


class PeerFailures:
    """The ends of other processes, as one process sees them. On the loop thread, unless a method says otherwise.

    The end of a process is learned from its link, from `Children` if it was launched here, and from its launcher
    otherwise. The first report counts: callers and owners are told once.
    """

    def __init__(
        self, state: ProcessState, loop: asyncio.AbstractEventLoop, requester: Requester, requests: RequestServer
    ) -> None:
        self._state = state
        self._loop = loop
        self._requester = requester
        self._exit_reasons = _ExitReasons(self._forget)
        self._watched: set[str] = set()
        self._late: dict[str, asyncio.TimerHandle] = {}
        """Timers for processes whose link is lost, until the reason is known."""
        self._end: Callable[[str], object] | None = None
        self._told_of = ""
        """The process whose launcher has just reported its end, before its link has shown it."""
        requests.serve(EXIT_REASON, self._tell_exit_reason)

    def connect(
        self,
        *,
        transport: Transport,
        ports: PortTable,
        flow: Flow,
        loans: Loans,
        casts: CastSender,
        children: Children,
        remote_launch: RemoteLaunch,
        members: JoinedProcesses,
        owners: Ownership,
        history: FaultHistory,
    ) -> None:
        """Take the parts that learn of the end of a process. No process is known before."""
        self._transport = transport
        self._ports = ports
        self._flow = flow
        self._loans = loans
        self._casts = casts
        self._children = children
        self._remote_launch = remote_launch
        self._members = members
        self._owners = owners
        self._history = history

    def depend_on_launcher(self, end: Callable[[str], object]) -> None:
        """End this process, by ``end`` with the reason, if it loses its launcher. Called before the first dial."""
        self._end = end

    # How the end is learned

    def watch(self, peer: ProcessRef) -> None:
        """Ask the launcher of a process to watch it: it may have died before it could be reached. From any thread."""
        if peer.launcher is None or peer.id == self._state.root.id or peer.id in self._watched:
            return
        if self._is_launcher(peer):
            return  # this process ends with it
        self._watched.add(peer.id)
        exit_reason: Future[str] = self._requester.request(peer.launcher, EXIT_REASON, peer.id)

        def told(answer: Future[str]) -> None:
            try:
                reason = peek(answer)
            except ControlError as error:
                reason = f"so is the process that launched it: {error}"
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._told_by_launcher, peer, reason)

        exit_reason.add_done_callback(told)

    def link_lost(self, peer: ProcessRef, reason: str) -> None:
        """Note that nothing comes from a process, or goes to it, any more."""
        if self._end is not None and self._is_launcher(peer) and reason != STOPPED and not self._state.closing:
            link = self._transport.find(peer.id)
            patience_s = ORPHAN_S if link is not None and link.has_stood else 0.0  # the launcher waits for the first
            self._loop.call_later(patience_s, self._end, f"it has lost its launcher: {reason}")
        if self._children.link_lost(peer.id, reason):
            return
        is_explained = reason == STOPPED or NO_SIGN_OF_LIFE in reason or peer.id == self._told_of
        if not is_explained and self._remote_launch.is_ours(peer.id) and not self._state.closing:
            # Its launcher will soon report why it has ended.
            self._late[peer.id] = self._loop.call_later(EXIT_REASON_S, self._not_told_of_end, peer, reason)
        else:
            self._gone_afar(peer, reason)

    def _is_launcher(self, peer: ProcessRef) -> bool:
        launcher = self._state.me.launcher
        return launcher is not None and launcher.id == peer.id

    def child_ended(self, child: Child, reason: str) -> None:
        """Note the end of a process that was launched here."""
        self._gone(child.ref, reason, in_good_order=child.expected)

    def _not_told_of_end(self, peer: ProcessRef, reason: str) -> None:
        """Give up a process on another host: its launcher has not reported its end, so it may live."""
        self._remote_launch.give_up(peer, reason)
        self._told_of_end(peer, reason)

    def _told_by_launcher(self, peer: ProcessRef, reason: str) -> None:
        # Where its end is known already, that may be forgotten again by now, with so many others: it is no second end.
        if peer.id in self._watched:
            self._told_of_end(peer, reason)

    def _told_of_end(self, peer: ProcessRef, reason: str) -> None:
        if (timer := self._late.pop(peer.id, None)) is None:
            self._told_of = peer.id
            self._transport.lose(peer, reason)  # which calls `link_lost` if the link stands
            self._told_of = ""
        else:
            timer.cancel()
            self._gone_afar(peer, reason)

    def _gone_afar(self, peer: ProcessRef, reason: str) -> None:
        self._gone(peer, reason, in_good_order=reason == STOPPED or self._remote_launch.is_to_end(peer.id))

    def _tell_exit_reason(self, mail: Mail, process_id: str) -> Future[str]:
        """Answer once a child of this process, or a process that has joined, is gone, with the reason."""
        child = self._children.get(process_id)
        ended = child.ended if child is not None else self._members.end_of(process_id)
        ended = ended or self._remote_launch.end_of(process_id)
        return ended or Future.of("its launcher does not know this process")

    # Consequences

    def _gone(self, peer: ProcessRef, reason: str, *, in_good_order: bool) -> None:
        """Do everything that follows from the end of a process: for its callers, its owners, and what it owned."""
        exit_reason = Loss.of(peer, reason, in_good_order=in_good_order)
        # The order matters. From now on, a sender finds the reason noted and the link lost. From `peer_gone` on, a
        # caster finds the member gone. Code that has sent or cast before has a port, which is told below.
        self._exit_reasons.write(peer.id, exit_reason)
        self._transport.lose(peer, reason)
        self._watched.discard(peer.id)
        self._remote_launch.gone(peer, reason)
        self._casts.peer_gone(peer)
        self._members.leave(peer, reason)
        self._ports.process_lost(peer.id, exit_reason)
        if (link := self._transport.find(peer.id)) is not None:
            unsent, link.unsent = link.unsent, []
            for message in unsent:
                if not isinstance(message, Cast):
                    self.tell(peer, message, exit_reason)
                elif not self._is_done(peer, message, exit_reason):
                    self._casts.undelivered(peer, message, exit_reason)
        self._flow.forget(peer)
        self._loans.forget(peer.id)
        if exit_reason.kind is not None and peer.launcher is not None and peer.launcher.id == self._state.me.id:
            self._history.died(peer.name, reason)
        if not self._state.closing:
            self._owners.process_gone(peer, exit_reason, self._exit_reasons.__contains__)

    def sent_in_vain(self, to: ProcessRef, reason: str, message: Message) -> None:
        """Tell the callers that wait for the answer to a message that its link was lost; from any thread.

        Args:
            to: the receiver of the message.
            reason: why the link is lost.
            message: what was sent.
        """
        exit_reason = self._exit_reasons.get(to.id)
        child = self._children.get(to.id)
        if exit_reason is None and (child is not None or to.id in self._late) and not is_noticed(message):
            return  # a better reason will soon be known; the callers are told then
        in_good_order = reason == STOPPED or (child is not None and child.expected)
        self.tell(to, message, exit_reason or Loss.of(to, reason, in_good_order=in_good_order))

    def tell(self, to: ProcessRef, message: Message, loss: Loss) -> None:
        """Tell the callers that wait for the answer to a message why there will be none; from any thread."""
        if not is_noticed(message):
            self._ports.process_lost(to.id, loss)
        elif not self._is_done(to, message, loss):
            self._ports.undelivered(message.reply_to, loss)

    def _is_done(self, to: ProcessRef, message: Message, loss: Loss) -> bool:
        """Whether a process was stopped after it had handled the message."""
        return loss.kind is None and isinstance(message, Cast) and self._casts.is_done_with(to, message)

    def _forget(self, process_id: str) -> None:
        self._transport.forget(process_id)
        self._children.forget(process_id)
