"""`Relays`: the trees that this process is a node of, and the order of what comes through them and directly.

See `control.runtime.cast.order` for how the order is kept. One lock guards all messages with a number, since they
arrive on the threads of several links.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from skipper.control.model.failure import MeshFailure
from skipper.control.runtime.cast.messages import Opening
from skipper.control.runtime.cast.order import ArrivalOrder
from skipper.control.runtime.cast.relay import HeldCast, Relay
from skipper.control.runtime.interfaces import Sender
from skipper.control.runtime.messages import CastNode, Loss, Mail
from skipper.control.runtime.replies import pack_supervision
from skipper.control.wire.messages import (
    Answer,
    Call,
    Cast,
    Filler,
    OfTree,
    ProcessRequest,
    RouteBegun,
    RouteClosed,
    RouteCut,
    RouteDone,
    RouteLost,
    RouteOpened,
    RouteSettled,
)
from skipper.control.wire.process_ref import ProcessRef

if TYPE_CHECKING:
    from skipper.control.runtime.actor_table import ActorTable
    from skipper.control.runtime.request_server import RequestServer

_GRACE_S = 10.0
"""How long a relay is kept after it was given up, or its caster is gone: casts may still be on their way."""

_CUT_S = 2.0
"""How long after the loss of a node below a relay asks the caster for another way to it. If the node is dead, the
caster knows that by then, and no longer has casts passed on to it."""

_Arrived: TypeAlias = HeldCast | Call | ProcessRequest | Answer | Filler
"""What has come from a caster, through a tree or directly."""


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
        self._orders: dict[str, ArrivalOrder[_Arrived]] = {}
        """The arrival order for each process that casts here."""
        self._speaks: set[str] = set()
        """Casters to which this process has also sent messages of its own: replies must stay behind those."""

    def get(self, route: int) -> Relay | None:
        """The relay of a route."""
        return self._relays.get(route)

    def speaks_to(self, process_id: str) -> None:
        """Note that an actor of this process sends something other than a reply to that process."""
        self._speaks.add(process_id)

    def answers_straight(self, relay: CastNode) -> bool:
        """Whether replies to this caster go directly: only then do they arrive behind other messages to it."""
        return relay.origin.id in self._speaks

    # Arrivals

    def cast(self, cast: Cast) -> None:
        """Take a cast."""
        with self._lock:
            relay = self._relays.get(cast.route)
            if relay is not None and (came := relay.take(cast)) is not None:
                self._order_of(relay.origin).put(*came)
                self._go_on(relay.origin)

    def message(self, sender: ProcessRef, message: OfTree) -> None:
        """Take a message of another node, or of the caster."""
        with self._lock:
            match message:
                case RouteOpened():
                    self._open(sender, Opening.of(message))
                case RouteBegun():
                    self._order_of(sender).begin()
                    self._go_on(sender)
                case Filler():
                    self.arrive(sender, message)
                case RouteClosed():
                    self._close_at(sender, message)
                case RouteDone():
                    if (relay := self._relays.get(message.route)) is not None:
                        relay.done(sender.id, message.number)
                case RouteSettled():
                    if (relay := self._relays.get(message.route)) is not None:
                        relay.settle(message.number)
                        for node in relay.below.values():
                            self._sender.pass_on(node.process, RouteSettled(message.route, message.number))
                case RouteCut():
                    if (relay := self._relays.get(message.route)) is not None:
                        relay.drop(message.process)

    def arrive(self, sender: ProcessRef, message: Call | ProcessRequest | Answer | Filler) -> None:
        """Take a direct message with a number: calls and requests are handled in their turn."""
        with self._lock:
            self._order_of(sender).put(message.sequence, message)
            self._go_on(sender)

    # Ends

    def peer_gone(self, peer: ProcessRef) -> None:
        """Ask the casters for other ways around a node that is gone; forget a caster that is gone after a while."""
        with self._lock:
            self._speaks.discard(peer.id)
            for relay in self._relays.values():
                if relay.parent.id == peer.id and relay.origin.id != peer.id:
                    self._sender.pass_on(relay.origin, RouteLost(relay.number))
                elif peer.id in relay.below:
                    self._cannot_reach(relay, peer)
            if peer.id in self._orders:
                self._later(self._forget, peer)

    def undelivered(self, peer: ProcessRef, cast: Cast, loss: Loss) -> None:
        """Tell the caster that a broadcast could not be passed on to a process that is gone."""
        with self._lock:
            relay = self._relays.get(cast.route)
            if relay is not None:
                cause = None
                if loss.kind is not None:
                    cause = MeshFailure(peer.name, peer.id, None, loss.kind, loss.reason, source=loss.process_id)
                relay.undelivered(peer.id, cast, pack_supervision(loss.reason, cause))

    def flush(self) -> None:
        """Send up all replies that wait for others, since this process ends."""
        with self._lock:
            relays = list(self._relays.values())
        for relay in relays:
            relay.flush()

    # Under the lock

    def _open(self, sender: ProcessRef, opening: Opening) -> None:
        relay = self._relays.get(opening.route)
        if relay is not None:
            if relay.parent.id == relay.origin.id != sender.id:
                return  # a late message of a parent that the caster has replaced
            for node in relay.reopen(opening, sender):
                self._cannot_reach(relay, node)
            return
        relay = self._relays[opening.route] = Relay(self._sender, self._actors, self._loop, opening, sender)
        order = self._order_of(relay.origin)
        if not opening.starts[0][1]:
            order.begin()
        for node in relay.open_below(opening):
            self._cannot_reach(relay, node)

    def _cannot_reach(self, relay: Relay, node: ProcessRef) -> None:
        """Note that this process has lost a node below, which may live and be reachable for the caster."""
        self._later(self._ask_for_way_to, relay, node, delay_s=_CUT_S)

    def _ask_for_way_to(self, relay: Relay, node: ProcessRef) -> None:
        with self._lock:
            if self._relays.get(relay.number) is relay and node.id in relay.below:
                self._sender.pass_on(relay.origin, RouteCut(relay.number, node.id))

    def _close_at(self, caster: ProcessRef, closed: RouteClosed) -> None:
        """Forget a route once its last cast has been delivered, or will never be."""
        relay = self._relays.get(closed.route)
        if relay is None:
            self._later(self._look_for_gap, caster)  # its opening, and all casts, may be lost with a node above
            return
        relay.close_behind(closed.number)
        if relay.is_over:
            self._close(relay)
        else:
            self._later(self._close_late, relay)

    def _close_late(self, relay: Relay) -> None:
        with self._lock:
            if self._relays.get(relay.number) is relay:
                self._close(relay)
        self._look_for_gap(relay.origin)

    def _look_for_gap(self, caster: ProcessRef, seen: int | None = None) -> None:
        """Continue without the casts of a given-up route that were lost with a node above: nobody sends them again."""
        with self._lock:
            order = self._order_of(caster)
            missing = order.waits_for
            if missing is None:
                return
            if missing == seen:
                order.skip()
                self._go_on(caster)
            self._later(self._look_for_gap, caster, order.waits_for)

    def _close(self, relay: Relay) -> None:
        del self._relays[relay.number]
        relay.flush()

    def _later(self, call: Callable[..., None], *arguments: object, delay_s: float = _GRACE_S) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: this process ends
            self._loop.call_soon_threadsafe(self._loop.call_later, delay_s, call, *arguments)

    def _forget(self, caster: ProcessRef) -> None:
        """Forget a caster that is gone, and what waits for a message that was lost with it: that leaves no gap."""
        with self._lock:
            self._orders.pop(caster.id, None)
            for relay in [relay for relay in self._relays.values() if relay.origin.id == caster.id]:
                self._close(relay)
            self._speaks.discard(caster.id)

    def _order_of(self, caster: ProcessRef) -> ArrivalOrder[_Arrived]:
        return self._orders.get(caster.id) or self._orders.setdefault(caster.id, ArrivalOrder())

    def _go_on(self, caster: ProcessRef) -> None:
        """Handle all messages of this caster that need not wait any more."""
        order = self._orders[caster.id]
        while (arrived := order.take()) is not None:
            if isinstance(arrived, HeldCast):
                arrived.deliver()
                if arrived.relay.is_over:
                    self._close(arrived.relay)
            elif isinstance(arrived, Call):
                self._actors.deliver(Mail(caster, arrived))
            elif isinstance(arrived, ProcessRequest):
                self._requests.handle(caster, arrived)
