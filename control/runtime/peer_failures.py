"""`PeerFailures`: how a process learns that others have ended, and everything that follows from it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from skipper.control.model.errors import ControlError
from skipper.control.model.future import Future
from skipper.control.runtime.exit_reasons import ExitReasons
from skipper.control.runtime.messages import Loss
from skipper.control.wire.envelope import NO_SIGN_OF_LIFE, NOTICE, STOPPED, Envelope, Kind, ProcessRef
from skipper.control.wire.payload import pack

if TYPE_CHECKING:
    from skipper.control.runtime.process import Process
    from skipper.control.runtime.procs.children import Child

OBITUARY_S = 1.0
"""So long after its link has broken is it waited for why a process on another host has ended."""


class PeerFailures:
    """The ends of other processes, as one process sees them. On the loop thread, unless a method says otherwise.

    A process is known to have ended by its link, by `Children` where it was launched here, and by its launcher
    otherwise: whoever is the first to tell, its callers and owners are told once.
    """

    def __init__(self, process: Process, loop: asyncio.AbstractEventLoop) -> None:
        self._process = process
        self._loop = loop
        self._exit_reasons = ExitReasons(self._forget)
        self._watched: set[str] = set()
        self._late: dict[str, asyncio.TimerHandle] = {}
        """Processes whose link is lost, until it is known why."""

    # How it is learned

    def watch(self, peer: ProcessRef) -> None:
        """Have a process watched by its launcher: it may have died before it could be reached. From any thread."""
        if peer.launcher is None or peer.id == self._process.root.id or peer.id in self._watched:
            return
        self._watched.add(peer.id)
        obituary: Future[str] = self._process.request(peer.launcher, "obituary", pack(peer.id))

        def told(answer: Future[str]) -> None:
            try:
                reason = answer._peek()
            except ControlError as error:
                reason = f"so is the process that launched it: {error}"
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._told_of_end, peer, reason)

        obituary.add_done_callback(told)

    def link_lost(self, peer: ProcessRef, reason: str) -> None:
        """Take note that nothing comes from a process any more, nor goes there."""
        process = self._process
        if process.children.link_lost(peer.id, reason):
            return
        in_good_order, is_silent = reason == STOPPED, NO_SIGN_OF_LIFE in reason
        if not (in_good_order or is_silent) and process.remote_launch.is_ours(peer.id) and not process.closing:
            # Its launcher is about to tell why it has ended.
            self._late[peer.id] = self._loop.call_later(OBITUARY_S, self._told_of_end, peer, reason)
        else:
            self._gone_afar(peer, reason)

    def child_ended(self, child: Child, reason: str) -> None:
        """Take note of the end of a process that was launched here."""
        self._gone(child.ref, reason, in_good_order=child.expected)

    def _told_of_end(self, peer: ProcessRef, reason: str) -> None:
        if (timer := self._late.pop(peer.id, None)) is None:
            self._process.transport.lose(peer, reason)
        else:
            timer.cancel()
            self._gone_afar(peer, reason)

    def _gone_afar(self, peer: ProcessRef, reason: str) -> None:
        self._gone(peer, reason, in_good_order=reason == STOPPED or self._process.remote_launch.is_to_end(peer.id))

    # What follows

    def _gone(self, peer: ProcessRef, reason: str, *, in_good_order: bool) -> None:
        """Everything that follows from the end of a process: for its callers, its owners, and those it owned."""
        process = self._process
        obituary = Loss.of(peer, reason, in_good_order=in_good_order)
        # In this order: who sends from now on finds the link lost and the obituary written, who casts from then on
        # finds the member gone, and whoever sent or cast before has a port that is told here.
        self._exit_reasons.write(peer.id, obituary)
        process.transport.lose(peer, reason)
        self._watched.discard(peer.id)
        process.remote_launch.gone(peer, reason)
        process.casts.peer_gone(peer)
        process.members.leave(peer, reason)
        process.ports.process_lost(peer.id, obituary)
        if (link := process.transport.find(peer.id)) is not None:
            unsent, link.unsent = link.unsent, []
            for envelope in unsent:
                if envelope.kind is Kind.CAST:
                    process.casts.undelivered(peer, envelope, obituary)
                else:
                    self.tell(peer, envelope, obituary)
        process.flow.forget(peer)
        process.loans.forget(peer.id)
        if obituary.kind is not None and peer.launcher is not None and peer.launcher.id == process.me.id:
            process.history.died(peer.name, reason)
        if not process.closing:
            process.owners.process_gone(peer, obituary, self._exit_reasons.__contains__)

    def sent_in_vain(self, to: ProcessRef, reason: str, envelope: Envelope) -> None:
        """Tell who waits for the answer to an envelope that was posted to a lost link; from any thread.

        Args:
            to: the process that it was for.
            reason: why the link is lost.
            envelope: what was sent.
        """
        obituary = self._exit_reasons.get(to.id)
        child = self._process.children.get(to.id)
        if obituary is None and (child is not None or to.id in self._late) and envelope.reply_to < NOTICE:
            return  # its end is about to be seen, with a better reason, and whoever waits is told then
        in_good_order = reason == STOPPED or (child is not None and child.expected)
        self.tell(to, envelope, obituary or Loss.of(to, reason, in_good_order=in_good_order))

    def tell(self, to: ProcessRef, envelope: Envelope, loss: Loss) -> None:
        """Tell who waits for the answer to an envelope why there will be none; from any thread."""
        if envelope.kind is Kind.CALL and envelope.reply_to >= NOTICE:
            self._process.ports.undelivered(envelope.reply_to, loss)
        else:
            self._process.ports.process_lost(to.id, loss)

    def _forget(self, process_id: str) -> None:
        self._process.transport.forget(process_id)
        self._process.children.forget(process_id)
