"""`Branches`: the trees that this process is a node of, and the order of what comes by them and what comes straight.

See `trees` for how that is kept. All that comes down trees, and the marks that come straight, are dealt with
under one lock, since they arrive on the threads of several links.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from skipper.control.runtime.cast.messages import CastHeader, Opening, plain
from skipper.control.runtime.cast.relay import Branch, tree_message
from skipper.control.runtime.messages import Loss, Mail
from skipper.control.runtime.replies import pack_supervision
from skipper.control.wire.envelope import Envelope, Kind, ProcessRef

if TYPE_CHECKING:
    from skipper.control.runtime.process import Process

T = TypeVar("T")

_GRACE_S = 10.0
"""How long branches are kept that are given up, or whose caster is gone: what was cast may still be on its way."""

_CLOSED = 1024
"""Numbers of closed routes that are remembered, since what came straight may still refer to them."""

_ALL_MARKS = 1 << 63
"""More marks than ever come: those of a caster that is gone are not waited for."""


class Branches:
    """The branches of one process. Public methods may be called from any thread."""

    def __init__(self, process: Process, loop: asyncio.AbstractEventLoop) -> None:
        self._process = process
        self._loop = loop
        self._lock = threading.RLock()
        self._branches: dict[int, Branch] = {}
        self._closed: OrderedDict[int, None] = OrderedDict()
        self._marks: dict[str, int] = {}
        self._blocked: dict[str, deque[Envelope]] = {}
        """By caster: what came straight and has to wait for a cast; the first entry says for which."""
        self._speaks: set[str] = set()
        """Casters to which this process has also said something by itself, so that replies have to stay behind it."""

    def get(self, route: int) -> Branch | None:
        """The branch of a route."""
        return self._branches.get(route)

    def speaks_to(self, process_id: str) -> None:
        """Note that an actor of this process sends something to that process which is no reply."""
        self._speaks.add(process_id)

    def answers_straight(self, branch: Branch) -> bool:
        """Whether replies to this caster go straight: only so do they arrive behind what else was sent there."""
        return branch.origin.id in self._speaks

    # What comes

    def cast(self, envelope: Envelope) -> None:
        """Take a cast."""
        header = CastHeader.decode(envelope.payload[0])
        with self._lock:
            branch = self._branches.get(header.route)
            if branch is not None:
                branch.take(envelope, header)
                self._go_on(branch.origin)

    def message(self, sender: ProcessRef, envelope: Envelope) -> None:
        """Take what another node, or the caster, has to say."""
        with self._lock:
            if envelope.method == "open":
                self._open(sender, Opening.decode(envelope.payload[0]))
            elif envelope.method == "mark" or envelope.method == "after":
                if not self._hold(sender, envelope):
                    self._blocked[sender.id] = deque([envelope])
                    self._go_on(sender)
            elif envelope.method == "close":
                self._close_at(sender, envelope)
            elif (branch := self._branches.get(envelope.target)) is None:
                return
            elif envelope.method == "done":
                branch.done(sender.id, envelope.reply_to)
            elif envelope.method == "settle":
                branch.settle(envelope.reply_to)
                self._pass_on(branch, envelope)
            elif envelope.method == "drop":
                branch.drop(bytes(plain(envelope.payload[0])).decode())

    def hold(self, sender: ProcessRef, envelope: Envelope) -> bool:
        """Keep what came straight from a caster if it has to wait for a cast; else False."""
        if sender.id not in self._blocked:
            return False
        with self._lock:
            return self._hold(sender, envelope)

    # Ends

    def peer_gone(self, peer: ProcessRef) -> None:
        """Ask the casters for another way where a parent is gone; forget a caster that is gone after a while."""
        with self._lock:
            self._speaks.discard(peer.id)
            for branch in self._branches.values():
                if branch.parent.id == peer.id and branch.origin.id != peer.id:
                    self._process.pass_on(branch.origin, tree_message("orphan", branch.number, 0))
            if any(branch.origin.id == peer.id for branch in self._branches.values()) or peer.id in self._blocked:
                self._later(self._forget, peer)

    def undelivered(self, peer: ProcessRef, envelope: Envelope, loss: Loss) -> None:
        """A broadcast could not be passed on to a process that is gone: tell the caster."""
        with self._lock:
            branch = self._branches.get(CastHeader.decode(envelope.payload[0]).route)
            if branch is not None:
                branch.undelivered(peer.id, envelope, pack_supervision(loss.reason, None))

    def flush(self) -> None:
        """Send up all replies that wait for others: this process ends."""
        with self._lock:
            branches = list(self._branches.values())
        for branch in branches:
            branch.flush()

    # Under the lock

    def _open(self, sender: ProcessRef, opening: Opening) -> None:
        branch = self._branches.get(opening.route)
        if branch is not None:
            branch.reopen(opening, sender)
            return
        branch = self._branches[opening.route] = Branch(self._process, self._loop, opening, sender)
        for node in branch.below.values():
            self._process.pass_on(node.process, tree_message("open", 0, 0, opening.part(node.span).encode()))

    def _pass_on(self, branch: Branch, envelope: Envelope) -> None:
        for node in branch.below.values():
            self._process.pass_on(node.process, tree_message(envelope.method, envelope.target, envelope.reply_to))

    def _close_at(self, caster: ProcessRef, envelope: Envelope) -> None:
        """Forget a route once its last cast has been delivered, or will not be any more."""
        branch = self._branches.get(envelope.target)
        if branch is None:
            self._remember_closed(envelope.target)
        else:
            branch.closes_at = envelope.reply_to
            if not branch.is_over:
                self._later(self._close_late, branch)
        self._go_on(caster)

    def _close_late(self, branch: Branch) -> None:
        with self._lock:
            if self._branches.get(branch.number) is branch:
                self._close(branch)
                self._go_on(branch.origin)

    def _close(self, branch: Branch) -> None:
        del self._branches[branch.number]
        branch.flush()
        self._remember_closed(branch.number)

    def _remember_closed(self, route: int) -> None:
        self._closed[route] = None
        while len(self._closed) > _CLOSED:
            self._closed.popitem(last=False)

    def _later(self, call: Callable[[T], None], argument: T) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: this process ends
            self._loop.call_soon_threadsafe(self._loop.call_later, _GRACE_S, call, argument)

    def _forget(self, caster: ProcessRef) -> None:
        with self._lock:
            self._marks[caster.id] = _ALL_MARKS
            for branch in self._branches.values():
                if branch.origin.id == caster.id:
                    branch.closes_at = 0
            self._go_on(caster)
            for envelope in self._blocked.pop(caster.id, ()):
                self._arrive(caster, envelope)
            self._marks.pop(caster.id, None)
            self._speaks.discard(caster.id)

    def _hold(self, sender: ProcessRef, envelope: Envelope) -> bool:
        queue = self._blocked.get(sender.id)
        if queue is None:
            return False
        queue.append(envelope)
        return True

    def _go_on(self, caster: ProcessRef) -> None:
        """Deliver from this caster whatever nothing stands in the way of any more."""
        has_moved = True
        while has_moved:
            mark = self._marks.get(caster.id, 0)
            branches = [branch for branch in self._branches.values() if branch.origin.id == caster.id]
            has_moved = False
            for branch in branches:
                has_moved = branch.deliver(mark, self._has_come) or has_moved
                if branch.is_over:
                    self._close(branch)
                    has_moved = True
            queue = self._blocked.get(caster.id)
            while queue and self._may_arrive(queue[0]):
                self._arrive(caster, queue.popleft())
                has_moved = True
            if queue is not None and not queue:
                del self._blocked[caster.id]

    def _may_arrive(self, envelope: Envelope) -> bool:
        if envelope.kind is not Kind.TREE or envelope.method != "after":
            return True
        return self._has_come(envelope.target, envelope.reply_to)

    def _has_come(self, route: int, number: int) -> bool:
        """Whether that cast has been given to the actor, or will never be."""
        branch = self._branches.get(route)
        if branch is None:
            return route in self._closed  # else its opening is still on its way
        return branch.delivered >= number

    def _arrive(self, caster: ProcessRef, envelope: Envelope) -> None:
        if envelope.kind is Kind.CALL:
            self._process.cells.deliver(Mail(caster, envelope))
        elif envelope.kind is Kind.AGENT:
            self._process.agent.handle(caster, envelope)
        elif envelope.method == "mark":
            self._marks[caster.id] = envelope.reply_to
