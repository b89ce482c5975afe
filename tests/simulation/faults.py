"""Faults to plant into the runtime: each breaks an invariant, so that it is seen whether the simulation finds it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from skipper.control.runtime.cast.order import ArrivalOrder
from skipper.control.runtime.cast.relay import Relay
from skipper.control.runtime.cast.relays import Relays
from skipper.control.runtime.cast.route import Route
from skipper.control.runtime.ownership import Ownership
from skipper.control.runtime.peer_failures import PeerFailures
from skipper.control.runtime.ports import DeathWatch, PortTable
from skipper.control.runtime.procs.remote_launch import RemoteLaunch
from skipper.control.services import service_client
from skipper.control.services.replica_controller import ReplicaController
from skipper.control.services.request_sequencer import RequestSequencer
from skipper.control.services.router import Router
from skipper.control.wire.link import Link
from skipper.torchstore.clients.controller_link import ControllerLink, HeldLeases
from skipper.torchstore.controller.history import History
from skipper.torchstore.controller.journal import Journal
from skipper.torchstore.controller.state import Answers
from skipper.torchstore.controller.volumes import Volumes


def _order_is_not_kept() -> None:
    """What comes is handled as it comes."""

    def take(self: Any) -> Any:
        number = min(self._held, default=None) if self._next else None
        return None if number is None else self._held.pop(number)

    ArrivalOrder.take = take  # type: ignore[method-assign]


def _what_comes_again_is_handled_again() -> None:
    """A relay takes a cast that it has had."""

    def take(self: Any, cast: Any) -> Any:
        self.received = min(self.received, cast.number - 1)
        return original(self, cast)

    def put(self: Any, number: int, thing: Any) -> None:
        self._held.setdefault(max(number, self._next), thing)

    original = Relay.take
    Relay.take = take  # type: ignore[method-assign]
    ArrivalOrder.put = put  # type: ignore[method-assign]


def _children_of_the_dead_are_forgotten() -> None:
    """Nobody sends to those below a dead node."""
    Route._adopt_below = lambda self, position: []  # type: ignore[method-assign]


def _casts_are_not_sent_again() -> None:
    """Those below a dead node get only what is cast from then on."""
    Route.unfinished = lambda self, span: []  # type: ignore[method-assign]


def _replies_are_not_kept() -> None:
    """What a node has answered is forgotten once it is on its way."""

    def reopen(self: Any, opening: Any, parent: Any) -> Any:
        self._kept.clear()
        return original(self, opening, parent)

    original = Relay.reopen
    Relay.reopen = reopen  # type: ignore[method-assign]


def _a_lost_parent_is_not_told() -> None:
    """A node whose link upwards breaks says nothing."""
    Relays.peer_gone = lambda self, peer: None  # type: ignore[method-assign]


def _nodes_below_are_given_up() -> None:
    """A relay that has lost a node below says nothing: found by this simulation."""
    Relays._cannot_reach = lambda self, relay, node: None  # type: ignore[method-assign]


def _callers_are_not_told_of_deaths() -> None:
    """Who waits for a dead process waits for ever."""
    PortTable.process_lost = lambda self, process_id, loss: None  # type: ignore[method-assign]


def _owners_are_not_told_of_deaths() -> None:
    """The owner of a mesh does not hear of the end of a process."""
    Ownership.process_gone = lambda self, peer, loss, is_gone: None  # type: ignore[method-assign]


def _owners_are_told_twice() -> None:
    """The owner of a mesh hears of each end twice."""

    def process_gone(self: Any, peer: Any, loss: Any, is_gone: Any) -> None:
        original(self, peer, loss, lambda process_id: False)
        for owner in self._owners():
            for places in owner.meshes._places.values():
                places.lost.discard(peer.id)
        original(self, peer, loss, is_gone)

    original = Ownership.process_gone
    Ownership.process_gone = process_gone  # type: ignore[method-assign]


def _linked_ports_wait_for_the_dead() -> None:
    """A port does not hear of the ends of the actors that it is linked to."""
    DeathWatch._tell = lambda self: None  # type: ignore[method-assign]


def _launchers_keep_deaths_to_themselves() -> None:
    """Nobody hears of the end of a process that it casts to and has no link to, nor from those above it."""
    PeerFailures.watch = lambda self, peer: None  # type: ignore[method-assign]
    _nodes_below_are_given_up()


def _given_up_processes_live_on() -> None:
    """Nobody ends a process on another host that its owner has lost: found by this simulation."""
    RemoteLaunch.give_up = lambda self, process, reason: None  # type: ignore[method-assign]


def _replies_overtake_values() -> None:
    """Replies go up the tree though the actor has sent values by itself."""
    Relays.answers_straight = lambda self, relay: False  # type: ignore[method-assign]


def _a_break_loses_a_message() -> None:
    """A link drops what waits while something is on its way."""

    def sent(self: Any) -> None:
        if self._outbox:
            self._outbox.popleft()
        original(self)

    original = Link.sent
    Link.sent = sent  # type: ignore[method-assign]


def _requests_are_always_sent_again() -> None:
    """Also those that a dead replica may have handled, and that must not be repeated."""
    service_client.may_retry = lambda spec, error, attempts, limit: True


def _dead_replicas_are_not_replaced() -> None:
    """The service stays as small as a death has left it."""
    ReplicaController._try_again = lambda self, number, *, is_early: True  # type: ignore[method-assign]


def _requests_wait_for_replicas_out_of_reach() -> None:
    """Who has lost a replica that lives waits for another: found by this simulation."""
    Router.is_out_of_reach = lambda self, number=None: False  # type: ignore[method-assign]


def _pairs_that_are_cut_stay() -> None:
    """A replica whose processes have lost each other is not replaced: found by this simulation."""
    RequestSequencer._refuse = lambda self, port, method, error: self._pass_on(port, method, error)  # type: ignore[method-assign]


def _a_journal_loses_a_record() -> None:
    """One of eight changes is not written."""

    def append(self: Any, record: bytes) -> None:
        if sum(record) % 8:
            original(self, record)

    original = Journal.append
    Journal.append = append  # type: ignore[method-assign]


def _requests_that_come_again_are_done_again() -> None:
    """A controller does not look whether it has answered a request."""
    Answers.find = lambda self, client, request: None  # type: ignore[method-assign]


def _memory_is_reused_while_it_is_read() -> None:
    """Versions are retired though readers hold leases."""

    def reap(self: Any) -> Any:
        for version in self.draining:
            version.leases.clear()
        return original(self)

    original = History.reap
    History.reap = reap  # type: ignore[method-assign]


def _leases_of_the_dead_are_kept() -> None:
    """A reader that dies holds its versions for ever."""

    def process_died(self: Any, process: Any, reason: str) -> None:
        leases = [(version, dict(version.leases)) for version in self._all()]
        original(self, process, reason)
        for version, before in leases:
            version.leases.update(before)

    original = History.process_died
    History.process_died = process_died  # type: ignore[method-assign]


def _leases_are_not_given_back_again() -> None:
    """A release that its controller did not get is not sent to the next one, which takes the lease for held."""

    def after(self: Any, life: int, timeout: float) -> Any:
        leases, batches = original(self, life, timeout)
        return leases | given_back, batches

    def give_back(self: Any, leases: Any, batch: int, call: Any) -> None:
        given_back.update(leases)
        call(self.actor)

    given_back: set[tuple[str, int]] = set()
    original = HeldLeases.after
    HeldLeases.after = after  # type: ignore[method-assign]
    ControllerLink.give_back = give_back  # type: ignore[method-assign]


def _memory_of_dead_publishers_is_kept() -> None:
    """Nobody tells the volumes that a publisher is dead."""
    Volumes.free_writer = lambda self, writer, keep, clients_below: None  # type: ignore[method-assign]


PLANTED: dict[str, Callable[[], None]] = {
    plant.__name__.strip("_").replace("_", "-"): plant
    for plant in (
        _order_is_not_kept,
        _what_comes_again_is_handled_again,
        _children_of_the_dead_are_forgotten,
        _casts_are_not_sent_again,
        _replies_are_not_kept,
        _a_lost_parent_is_not_told,
        _nodes_below_are_given_up,
        _callers_are_not_told_of_deaths,
        _owners_are_not_told_of_deaths,
        _owners_are_told_twice,
        _linked_ports_wait_for_the_dead,
        _launchers_keep_deaths_to_themselves,
        _given_up_processes_live_on,
        _replies_overtake_values,
        _a_break_loses_a_message,
        _requests_are_always_sent_again,
        _dead_replicas_are_not_replaced,
        _requests_wait_for_replicas_out_of_reach,
        _pairs_that_are_cut_stay,
        _a_journal_loses_a_record,
        _requests_that_come_again_are_done_again,
        _memory_is_reused_while_it_is_read,
        _leases_of_the_dead_are_kept,
        _leases_are_not_given_back_again,
        _memory_of_dead_publishers_is_kept,
    )
}
"""By name. Each is planted for good into the process that calls it."""
