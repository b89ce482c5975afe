"""`CastSender`: casting to many down a tree of their own processes, and replies that come back up the same way.

A cast to more than a few receivers goes to some of them, its heads; each passes it on to some more, and so on (see
`control.runtime.cast.tree`). Replies go the same way back: a node waits for the replies of its subtree and sends them
on as one message. Relays pass on bytes: they know where a message goes, and nothing of its content. Every hop is a link
like any other.

**Order.** What one process sends to another arrives in the order of sending, whether it comes through a tree or
directly. From the first *route* on (from one process to one mesh or slice) that leads there, messages are numbered, see
`order`.

* Casts of one route are numbered, too, and every hop keeps their order. If nothing else is sent between two casts,
  nothing has to be said: each receiver counts on. Otherwise the header of a cast says how many messages were, and to
  whom.
* Behind the messages before the first route, the message ``begin`` is sent directly if a link stands already, and the
  number 1 waits for it.
* Numbers are given out under one lock, so no two can wait for each other. A relay passes a cast on before it waits for
  its own turn. Replies wait for nothing.
* A receiver that has sent something to the caster by itself (a call, a value to a port) answers directly from then on,
  so that its replies stay behind that.

**Deaths.** The caster subscribes to the death of every receiver. It then sends directly to the nodes below the dead
one: first the route again, then every cast that they may not have got, that is, every cast that not all ranks are known
to have handled. They drop what they had, by its number: nothing comes twice and nothing is left out. Every node keeps
its own replies until the caster no longer needs them, and sends them again when a node above it has died; ports take
the first reply of each rank. The dead rank itself cannot answer; its callers get the usual error. A node that hangs
counts as dead after the heartbeat's bound. A node whose link upwards breaks asks the caster for another way; so does a
node that has lost a node below which may still live.

**Back-pressure.** A node reports upwards what its whole subtree has handled. The caster waits before it is further
ahead than `Settings.max_unhandled` casts, or that many bytes. A cast with parts that are lent goes directly.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from skipper.control.model.settings import settings
from skipper.control.runtime.cast.messages import Start, unpack_answers
from skipper.control.runtime.cast.relays import Relays
from skipper.control.runtime.cast.route import Route
from skipper.control.runtime.cast.tree import RankSpan
from skipper.control.runtime.interfaces import Sender
from skipper.control.runtime.messages import Loss, Mail
from skipper.control.wire.bulk import Incoming, Outgoing
from skipper.control.wire.messages import (
    Call,
    Cast,
    CastAnswers,
    Filler,
    Kind,
    Message,
    OfTree,
    Payload,
    RouteBegun,
    RouteClosed,
    RouteCut,
    RouteDone,
    RouteLost,
    RouteSettled,
)
from skipper.control.wire.process_ref import ProcessRef

if TYPE_CHECKING:
    from skipper.control.runtime.flow_control import Flow
    from skipper.control.runtime.ports import PortTable
    from skipper.control.runtime.process_state import ProcessState
    from skipper.control.wire.link import Link
    from skipper.control.wire.transport import Transport

_MAX_ROUTES = 256
"""How many routes a process keeps; beyond that, the least recently used one is given up."""

_SETTLE_S = 1.0
"""How long after a cast the receivers are told that its replies have arrived, unless another cast says so."""


class CastSender:
    """The trees of one process: those that it casts down, and those in which it is a node. For any thread."""

    def __init__(
        self,
        state: ProcessState,
        loop: asyncio.AbstractEventLoop,
        sender: Sender,
        ports: PortTable,
        transport: Transport,
        flow: Flow,
        relays: Relays,
        *,
        watch: Callable[[ProcessRef], object],
    ) -> None:
        self.relays = relays
        self._state = state
        self._loop = loop
        self._sender = sender
        self._ports = ports
        self._transport = transport
        self._flow = flow
        self._watch_process = watch
        self.are_used = False
        """Whether this process has ever cast down a tree, so that the order of its other messages matters."""
        self._lock = threading.Lock()
        self._routes: OrderedDict[int, Route] = OrderedDict()
        self._of_mesh: dict[int, list[Route]] = {}
        self._of_process: dict[str, list[Route]] = {}
        self._straight: dict[str, int] = {}
        """For each process that a route has ever led to: how many messages, other than casts of open routes, have a
        number."""
        self._has_begun: set[str] = set()
        """The processes among them that wait for a ``begin``."""

    # Sending

    def cast(self, members: tuple[ProcessRef, ...], call: Call) -> bool:
        """Send a message to every member, down a tree; False if it has to go directly.

        Args:
            members: the processes of a mesh, in rank order.
            call: the message, without the rank.

        Raises:
            BackpressureError: the members are too far behind; nothing has been sent.
        """
        me = self._state.me
        if members[0].job != me.job or any(isinstance(part, Outgoing | Incoming) for part in call.payload):
            return False
        nbytes = sum(map(len, call.payload))
        while True:
            route, is_new = self._route(call.target, members)
            if is_new:
                self._watch(route)
            self._flow.admit_cast(route.window, call, nbytes)
            with self._lock:
                if not route.is_closed:
                    self._post_cast(route, call, nbytes)
                    break
        for rank, member in enumerate(members):
            if member.id == me.id:
                self._sender.send(member, call.for_rank(rank))
        for rank, member in list(route.gone):
            self._sender.send(member, call.for_rank(rank))  # which tells the waiting callers
        return True

    def post(self, link: Link, message: Message) -> None:
        """Post a direct message, in its place among the casts. It is dropped if the link is lost."""
        to = link.peer.id
        with self._lock:
            if to in self._straight:
                self._straight[to] += 1
                message.sequence = self._straight[to]
                for route in self._of_process.get(to, ()):
                    position = route.position[to]
                    route.moved[position] = route.moved.get(position, 0) + 1
                    message.sequence += route.last
            if link.lost is None:
                link.post(message)

    def stay_behind(self, link: Link) -> None:
        """Make casts stay behind a message that was just posted on a link, without a number."""
        self.post(link, Filler())

    def reply(self, mail: Mail, kind: Kind, payload: Payload) -> bool:
        """Answer a message that has come through a tree the same way; False if the answer has to go directly."""
        way, call = mail.cast, mail.message
        if way is None or not isinstance(call, Call) or self.relays.answers_straight(way.relay):
            return False
        return way.relay.reply(way.number, call, kind, payload)

    # Receiving

    def take(self, sender: ProcessRef, message: OfTree) -> None:
        """Take a message from another node, or from a caster."""
        match message:
            case Cast():
                self.relays.cast(message)
            case CastAnswers():
                given = unpack_answers(message)
                if message.is_home:
                    for answer in given:
                        self._ports.deliver(message.port, answer.rank, answer.kind, answer.payload)
                elif (relay := self.relays.get(message.route)) is not None:
                    relay.gather(sender.id, message.port, message.number, given)
            case RouteDone() if (route := self._routes.get(message.route)) is not None:
                with self._lock:
                    route.done(sender.id, message.number)
            case RouteLost():
                self._find_way_to(sender.id, message.route)
            case RouteCut() if message.route in self._routes:
                self._find_way_to(message.process, message.route)
            case _:
                self.relays.message(sender, message)

    def _find_way_to(self, process_id: str, number: int) -> None:
        """Send directly to a node that has lost its parent, or that its parent has lost."""
        if (route := self._routes.get(number)) is not None:
            with self._lock:
                self._adopt(route, *route.adopt(process_id), process_id)

    def peer_gone(self, peer: ProcessRef) -> None:
        """Send what a dead node should have passed on to the nodes below it, and forget what a dead caster wants."""
        with self._lock:
            for route in self._of_process.pop(peer.id, ()):
                self._adopt(route, *route.bury(peer.id), peer.id)
                route.after_burial()
            self._straight.pop(peer.id, None)
            self._has_begun.discard(peer.id)
        self.relays.peer_gone(peer)

    def undelivered(self, peer: ProcessRef, cast: Cast, loss: Loss) -> None:
        """Tell the sender of a broadcast that a process is gone, to which it was not even sent."""
        if cast.route in self._routes:
            self._ports.undelivered(cast.reply_to, loss)
        else:
            self.relays.undelivered(peer, cast, loss)

    def is_done_with(self, peer: ProcessRef, cast: Cast) -> bool:
        """Whether a stopped process has handled a cast that could not be sent to it again.

        If a whole mesh is stopped, nodes in the middle of the tree may end before they have reported what the nodes
        below have handled. The cast is sent again to these, which have handled it, and may have been stopped since.
        """
        route = self._routes.get(cast.route)
        return route is not None and route.may_have_come(peer.id, cast.number)

    def close(self, uid: int) -> None:
        """Give up the routes to a mesh that has ended."""
        with self._lock:
            for route in list(self._of_mesh.get(uid, ())):
                self._close(uid, route)

    # Under the lock

    def _route(self, uid: int, members: tuple[ProcessRef, ...]) -> tuple[Route, bool]:
        with self._lock:
            for route in self._of_mesh.get(uid, ()):
                if route.members == members:
                    self._routes.move_to_end(route.number)
                    return route, False
            self.are_used = True
            route = self._open(members)
            self._routes[route.number] = route
            self._of_mesh.setdefault(uid, []).append(route)
            if len(self._routes) > _MAX_ROUTES:
                self._close_oldest()
            return route, True

    def _open(self, members: tuple[ProcessRef, ...]) -> Route:
        me = self._state.me
        links = [self._transport.find(member.id) for member in members]
        is_lost = [link is not None and link.lost is not None for link in links]
        nodes = tuple((rank, member) for rank, member in enumerate(members) if not is_lost[rank] and member.id != me.id)
        starts = [self._start(member, links[rank]) for rank, member in nodes]
        number = secrets.randbits(62)
        route = Route(number, me, members, nodes, starts, settings().tree_fanout, self._routes.values())
        route.gone += [(rank, member) for rank, member in enumerate(members) if is_lost[rank]]
        for _, member in nodes:
            self._of_process.setdefault(member.id, []).append(route)
        for span in route.tree.heads:
            self._introduce(route, span)
        return route

    def _start(self, member: ProcessRef, link: Link | None) -> Start:
        """Where the numbers of a route begin at a node; all messages to it are numbered from now on."""
        if member.id not in self._straight:
            self._straight[member.id] = 0
            if link is not None:
                self._has_begun.add(member.id)
                self._sender.pass_on(member, RouteBegun())
        casts = sum(route.last for route in self._of_process.get(member.id, ()))
        return self._straight[member.id] + casts, member.id in self._has_begun

    def _introduce(self, route: Route, span: RankSpan) -> None:
        process = route.nodes[span.first][1]
        self._sender.pass_on(process, route.opening(span).message())

    def _post_cast(self, route: Route, call: Call, nbytes: int) -> None:
        route.cast(call, self._routes.values(), nbytes, self._ports.is_open)
        for position in route.heads:
            self._sender.pass_on(route.nodes[position][1], route.newest(route.tree.span_at[position]))
        if route.waits and not route.is_settling:
            self._settle_later(route)

    def _adopt(self, route: Route, parent: ProcessRef | None, spans: list[RankSpan], child_id: str) -> None:
        for span in spans:
            self._introduce(route, span)
            for cast in route.unfinished(span):
                self._sender.pass_on(route.nodes[span.first][1], cast)
        if parent is not None:
            # Until now it counted the child among those that have not handled everything, so it forgot nothing.
            self._sender.pass_on(parent, RouteCut(route.number, child_id))

    def _close(self, uid: int, route: Route) -> None:
        self._routes.pop(route.number, None)
        self._of_mesh[uid].remove(route)
        for other in self._routes.values():
            other.absorb(route)
        if not self._of_mesh[uid]:
            del self._of_mesh[uid]
        for _, member in route.nodes:
            if member.id in self._straight:
                self._straight[member.id] += route.last
            self._sender.pass_on(member, RouteClosed(route.number, route.last))
            routes = self._of_process.get(member.id)
            if routes is not None and route in routes:
                routes.remove(route)
                if not routes:
                    del self._of_process[member.id]
        route.close()

    def _close_oldest(self) -> None:
        oldest = next(iter(self._routes.values()))
        uid = next(uid for uid, routes in self._of_mesh.items() if oldest in routes)
        self._close(uid, oldest)

    # On the loop thread

    def _settle_later(self, route: Route) -> None:
        route.is_settling = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: this process ends
            self._loop.call_soon_threadsafe(self._loop.call_later, _SETTLE_S, self._settle, route)

    def _settle(self, route: Route) -> None:
        with self._lock:
            route.is_settling = False
            if route.is_closed:
                return
            settled = route.news_of_settled(self._ports.is_open)
            if settled is not None:
                for position in route.heads:
                    self._sender.pass_on(route.nodes[position][1], RouteSettled(route.number, settled))
            if route.waits:
                self._settle_later(route)

    # Not under the lock

    def _watch(self, route: Route) -> None:
        """Subscribe to the end of every member, also of members that this process does not dial."""
        for _, member in route.nodes:
            if self._transport.find(member.id) is None:
                self._watch_process(member)
