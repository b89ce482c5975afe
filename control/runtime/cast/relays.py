"""`Relays`: the trees that this process is a node of, and the order of what comes by them and what comes straight.

See `control.runtime.cast.sender` for how the order is kept. One lock guards all that comes down trees, and the marks
that come straight, since they arrive on the threads of several links.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from skipper.control.runtime.cast.messages import CastHeader, Opening, plain
from skipper.control.runtime.cast.relay import Relay, tree_message
from skipper.control.runtime.interfaces import Sender
from skipper.control.runtime.messages import CastNode, Loss, Mail
from skipper.control.runtime.replies import pack_supervision
from skipper.control.wire.envelope import Envelope, Kind, ProcessRef

if TYPE_CHECKING:
    from skipper.control.runtime.actor_table import ActorTable
    from skipper.control.runtime.request_server import RequestServer

T = TypeVar("T")

_GRACE_S = 10.0
"""How long relays are kept that are given up, or whose caster is gone: what was cast may still be on its way."""

_CLOSED = 1024
"""Numbers of closed routes that are remembered, since what came straight may still refer to them."""

_ALL_MARKS = 1 << 63
"""More marks than ever come: those of a caster that is gone are not waited for."""


class Relays:
    """The relays of one process. Public methods may be called from any thread."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, sender: Sender, actors: ActorTable, requests: RequestServer
    ) -> None:
        self._loop = loop
        self._sender = sender
        self._actors = actors
        self._requests = requests
        self._lock = threading.RLock()
        self._relays: dict[int, Relay] = {}
        self._closed: OrderedDict[int, None] = OrderedDict()
        self._marks: dict[str, int] = {}
        self._blocked: dict[str, deque[Envelope]] = {}
        """By caster: what came straight and has to wait for a cast; the first entry says for which."""
        self._speaks: set[str] = set()
        """Casters to which this process has also said something by itself, so that replies have to stay behind it."""

    def get(self, route: int) -> Relay | None:
        """The relay of a route."""
        return self._relays.get(route)

    def speaks_to(self, process_id: str) -> None:
        """Note that an actor of this process sends something to that process which is no reply."""
        self._speaks.add(process_id)

    def answers_straight(self, relay: CastNode) -> bool:
        """Whether replies to this caster go straight: only so do they arrive behind what else was sent there."""
        return relay.origin.id in self._speaks

    # What comes

    def cast(self, envelope: Envelope) -> None:
        """Take a cast."""
        header = CastHeader.decode(envelope.payload[0])
        with self._lock:
            relay = self._relays.get(header.route)
            if relay is not None:
                relay.take(envelope, header)
                self._go_on(relay.origin)

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
            elif (relay := self._relays.get(envelope.target)) is None:
                return
            elif envelope.method == "done":
                relay.done(sender.id, envelope.reply_to)
            elif envelope.method == "settle":
                relay.settle(envelope.reply_to)
                self._pass_on(relay, envelope)
            elif envelope.method == "drop":
                relay.drop(bytes(plain(envelope.payload[0])).decode())

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
            for relay in self._relays.values():
                if relay.parent.id == peer.id and relay.origin.id != peer.id:
                    self._sender.pass_on(relay.origin, tree_message("orphan", relay.number, 0))
            if any(relay.origin.id == peer.id for relay in self._relays.values()) or peer.id in self._blocked:
                self._later(self._forget, peer)

    def undelivered(self, peer: ProcessRef, envelope: Envelope, loss: Loss) -> None:
        """A broadcast could not be passed on to a process that is gone: tell the caster."""
        with self._lock:
            relay = self._relays.get(CastHeader.decode(envelope.payload[0]).route)
            if relay is not None:
                relay.undelivered(peer.id, envelope, pack_supervision(loss.reason, None))

    def flush(self) -> None:
        """Send up all replies that wait for others: this process ends."""
        with self._lock:
            relays = list(self._relays.values())
        for relay in relays:
            relay.flush()

    # Under the lock

    def _open(self, sender: ProcessRef, opening: Opening) -> None:
        relay = self._relays.get(opening.route)
        if relay is not None:
            relay.reopen(opening, sender)
            return
        relay = self._relays[opening.route] = Relay(self._sender, self._actors, self._loop, opening, sender)
        for node in relay.below.values():
            self._sender.pass_on(node.process, tree_message("open", 0, 0, opening.part(node.span).encode()))

    def _pass_on(self, relay: Relay, envelope: Envelope) -> None:
        for node in relay.below.values():
            self._sender.pass_on(node.process, tree_message(envelope.method, envelope.target, envelope.reply_to))

    def _close_at(self, caster: ProcessRef, envelope: Envelope) -> None:
        """Forget a route once its last cast has been delivered, or will not be any more."""
        relay = self._relays.get(envelope.target)
        if relay is None:
            self._remember_closed(envelope.target)
        else:
            relay.close_behind(envelope.reply_to)
            if not relay.is_over:
                self._later(self._close_late, relay)
        self._go_on(caster)

    def _close_late(self, relay: Relay) -> None:
        with self._lock:
            if self._relays.get(relay.number) is relay:
                self._close(relay)
                self._go_on(relay.origin)

    def _close(self, relay: Relay) -> None:
        del self._relays[relay.number]
        relay.flush()
        self._remember_closed(relay.number)

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
            for relay in self._relays.values():
                if relay.origin.id == caster.id:
                    relay.close_behind(0)
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
            relays = [relay for relay in self._relays.values() if relay.origin.id == caster.id]
            has_moved = False
            for relay in relays:
                has_moved = relay.deliver(mark, self._has_come) or has_moved
                if relay.is_over:
                    self._close(relay)
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
        relay = self._relays.get(route)
        if relay is None:
            return route in self._closed  # else its opening is still on its way
        return relay.delivered >= number

    def _arrive(self, caster: ProcessRef, envelope: Envelope) -> None:
        if envelope.kind is Kind.CALL:
            self._actors.deliver(Mail(caster, envelope))
        elif envelope.kind is Kind.AGENT:
            self._requests.handle(caster, envelope)
        elif envelope.method == "mark":
            self._marks[caster.id] = envelope.reply_to
