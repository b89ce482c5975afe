"""One order for what goes straight and what comes down trees, whatever the links do; only the links are the test's.

A process casts down several trees and speaks straight, and the links between all processes bring what they carry in any
interleaving that hypothesis likes; nodes die. What each survivor handles is what was said to it, once and in order.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skipper.control.model import settings as bounds
from skipper.control.runtime.cast.order import ArrivalOrder
from skipper.control.runtime.cast.relays import Relays
from skipper.control.runtime.cast.sender import CastSender
from skipper.control.wire.messages import Call, Message, OfTree, ProcessRequest
from skipper.control.wire.process_ref import ProcessRef

SIZE = 9
PARTS = (range(1, SIZE), range(1, SIZE - 1), range(2, SIZE), (1, 3, 5, 7), (8, 4, 2))
"""Which processes are cast to; the caster is none of them."""


@pytest.fixture(scope="module", autouse=True)
def deep_trees() -> Iterator[None]:
    """Trees of several levels for so few."""
    before = bounds.settings()
    bounds.adopt(dataclasses.replace(before, tree_fanout=2))
    yield
    bounds.adopt(before)


class Loop:
    """Keeps what is to be done later; none of it may be needed here."""

    def __init__(self) -> None:
        self.later: list[tuple[Callable[..., object], tuple[Any, ...]]] = []

    def call_soon_threadsafe(self, call_later: Any, delay_s: float, call: Any, *arguments: Any) -> None:
        """Note it."""
        self.later.append((call, arguments))

    def call_later(self, *arguments: Any) -> None:
        """Never called: see `call_soon_threadsafe`."""
        raise AssertionError


class Wire:
    """One direction of a link: what one process has posted for another, in order."""

    def __init__(self, peer: ProcessRef) -> None:
        self.peer = peer
        self.lost: str | None = None
        self.queue: deque[Message] = deque()

    def post(self, message: Message) -> None:
        """Send."""
        self.queue.append(message)


class Process:
    """The parts of a process that casts pass through, and what its actor has handled."""

    def __init__(self, world: World, number: int) -> None:
        self.me = ProcessRef(f"job-{number}", "", f"p{number}")
        self.world = world
        self.seen: list[int] = []
        self.wires: dict[str, Wire] = {}
        loop: Any = Loop()
        actors: Any = SimpleNamespace(deliver=self._handle)
        requests: Any = SimpleNamespace(handle=lambda sender, message: self._note(message))
        self.relays = Relays(loop, self, actors, requests)
        state: Any = SimpleNamespace(me=self.me)
        flow: Any = SimpleNamespace(admit_cast=lambda window, call, nbytes: None)
        ports: Any = SimpleNamespace(is_open=lambda number: False)
        transport: Any = SimpleNamespace(find=self.wires.get)
        self.casts = CastSender(state, loop, self, ports, transport, flow, self.relays, watch=lambda process: None)

    def _handle(self, mail: Any) -> None:
        self._note(mail.message)
        if mail.cast is not None:
            mail.cast.relay.handled(mail.cast.number, 64 << 20)  # which is told upwards at once

    def _note(self, message: Message) -> None:
        self.seen.append(int(bytes(message.payload[-1])))  # type: ignore[arg-type]

    def wire(self, to: ProcessRef) -> Wire:
        """The link to a process, which comes to be with the first message."""
        return self.wires.setdefault(to.id, Wire(to))

    def pass_on(self, to: ProcessRef, message: Message) -> bool:
        """As `Messenger.pass_on`."""
        wire = self.wire(to)
        if wire.lost is None:
            wire.post(message)
        return wire.lost is None

    def send(self, to: ProcessRef, message: Message) -> None:
        """As `Messenger.send` does with calls and requests."""
        wire = self.wire(to)
        if self.casts.are_used:
            self.casts.post(wire, message)  # type: ignore[arg-type]
        else:
            wire.post(message)

    def receive(self, sender: ProcessRef, message: Call | ProcessRequest | OfTree) -> None:
        """As `Messenger.deliver`."""
        if isinstance(message, OfTree):
            self.casts.take(sender, message)
        elif message.sequence:
            self.relays.arrive(sender, message)
        else:
            self._note(message)


class World:
    """All processes, and what was said to each."""

    def __init__(self) -> None:
        self.processes = [Process(self, number) for number in range(SIZE)]
        self.of = {process.me.id: process for process in self.processes}
        self.dead: set[str] = set()
        self.said: dict[str, list[int]] = {process.me.id: [] for process in self.processes}
        self.count = 0

    @property
    def caster(self) -> Process:
        """Who speaks."""
        return self.processes[0]

    def cast(self, part: int, mesh: int) -> None:
        """Cast down a tree."""
        self.count += 1
        members = tuple(self.processes[at].me for at in PARTS[part])
        for member in members:
            self.said[member.id].append(self.count)
        self.caster.casts.cast(members, Call(mesh, method="note", payload=(b"%d" % self.count,)))

    def say(self, at: int, kind: type[Call | ProcessRequest]) -> None:
        """Send something straight."""
        self.count += 1
        to = self.processes[at].me
        if to.id not in self.dead:
            self.said[to.id].append(self.count)
            self.caster.send(to, kind(1, payload=(b"%d" % self.count,)))

    def close(self, mesh: int) -> None:
        """A mesh has ended: its routes are given up."""
        self.caster.casts.close(mesh)

    def kill(self, at: int) -> None:
        """A node dies, and all who spoke with it learn of that."""
        process = self.processes[at]
        if process.me.id in self.dead:
            return
        self.dead.add(process.me.id)
        for other in self.processes:
            if other is not process and other.me.id not in self.dead:
                other.wire(process.me).lost = "it is gone"
                other.casts.peer_gone(process.me)

    def part(self, one: int, other: int) -> None:
        """The link between two nodes breaks, both of which live: what is on its way is lost, and both learn of it."""
        ends = self.processes[one], self.processes[other]
        if one == other or any(end.me.id in self.dead for end in ends):
            return
        for end, peer in (ends, ends[::-1]):
            wire = end.wire(peer.me)
            if wire.lost is None:
                wire.lost = "it has broken"
                wire.queue.clear()
                end.casts.peer_gone(peer.me)

    def let_time_pass(self) -> bool:
        """Relays ask for ways to the nodes that they have lost; False where none does."""
        asks = False
        for process in self.processes:
            loop: Any = process.relays._loop
            due = [each for each in loop.later if each[0].__name__ == "_ask_for_way_to"]
            loop.later = [each for each in loop.later if each not in due]
            for call, arguments in due if process.me.id not in self.dead else ():
                call(*arguments)
            asks = asks or bool(due)
        return asks

    def ways(self) -> list[tuple[Process, Wire]]:
        """The links that have something to bring."""
        return [
            (process, wire)
            for process in self.processes
            for wire in list(process.wires.values())
            if wire.queue and process.me.id not in self.dead and wire.peer.id not in self.dead
        ]

    def step(self, chosen: int) -> bool:
        """One link brings one message; False where none has any."""
        ways = self.ways()
        if not ways:
            return False
        process, wire = ways[chosen % len(ways)]
        self.of[wire.peer.id].receive(process.me, wire.queue.popleft())
        return True


ACTIONS = st.one_of(
    st.tuples(st.just("cast"), st.integers(0, len(PARTS) - 1), st.integers(1, 2)),
    st.tuples(st.just("say"), st.integers(1, SIZE - 1), st.sampled_from((Call, ProcessRequest))),
    st.tuples(st.just("step"), st.integers(0, 99)),
    st.tuples(st.just("step"), st.integers(0, 99)),
)


def play(actions: list[Any], order: list[int]) -> World:
    """Do all this, and have the links bring the rest in an order that the numbers choose."""
    world = World()
    for name, *arguments in actions:
        getattr(world, name)(*arguments)
    turn = 0
    while world.step(order[turn % len(order)] + turn) or world.let_time_pass():
        turn += 1
    return world


def check(world: World) -> None:
    """Every survivor has handled what was said to it, once and in order."""
    for process in world.processes[1:]:
        if process.me.id not in world.dead:
            assert process.seen == world.said[process.me.id], process.me.name


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(ACTIONS, min_size=8, max_size=50), st.lists(st.integers(0, 99), min_size=1, max_size=20))
def test_whatever_the_links_do_everything_arrives_once_and_in_order(actions: list[Any], order: list[int]) -> None:
    check(play(actions, order))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.one_of(ACTIONS, st.tuples(st.just("kill"), st.integers(1, SIZE - 1))), min_size=8, max_size=50),
    st.lists(st.integers(0, 99), min_size=1, max_size=20),
)
def test_nor_is_anything_lost_or_doubled_when_nodes_die(actions: list[Any], order: list[int]) -> None:
    check(play(actions, order))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.one_of(
            ACTIONS,
            st.tuples(st.just("kill"), st.integers(1, SIZE - 1)),
            st.tuples(st.just("part"), st.integers(1, SIZE - 1), st.integers(1, SIZE - 1)),
        ),
        min_size=8,
        max_size=50,
    ),
    st.lists(st.integers(0, 99), min_size=1, max_size=20),
)
def test_nor_where_links_break_between_nodes_that_live(actions: list[Any], order: list[int]) -> None:
    check(play(actions, order))


@pytest.mark.parametrize("when", ["before the route", "behind a cast", "with a cast on its way"])
def test_a_relay_that_has_lost_a_node_below_has_the_caster_send_to_it(when: str) -> None:
    """Found by `tests.simulation`: the node below knew nothing of the route, and could not ask by itself."""
    world = World()
    parent, child = 1, 2  # the first of the tree's heads, and who is below it
    if when == "before the route":
        world.part(parent, child)
    world.cast(0, 1)
    if when != "with a cast on its way":
        while world.step(0):
            pass
    else:
        while not world.processes[parent].wires:
            world.step(0)
    world.part(parent, child)
    world.cast(0, 1)
    while world.step(0) or world.let_time_pass():
        pass
    check(world)
    assert any(node.process.id == world.processes[child].me.id for node in _below(world, parent)) is False


def test_the_route_of_a_parent_that_has_died_does_not_come_before_that_of_the_caster() -> None:
    """Found by `tests.simulation`: it was on its way for longer, and the node below answered to the dead one then."""
    world = World()
    parent, child = 1, 2
    world.cast(0, 1)
    while not world.processes[parent].wires:
        world.step(0)
    late = world.processes[parent].wire(world.processes[child].me)
    world.kill(parent)
    while world.step(0):
        pass
    for message in late.queue:
        world.processes[child].receive(world.processes[parent].me, message)  # type: ignore[arg-type]
    check(world)
    assert [relay.parent for relay in world.processes[child].relays._relays.values()] == [world.caster.me]


def _below(world: World, at: int) -> list[Any]:
    """The nodes that one passes on to."""
    return [node for relay in world.processes[at].relays._relays.values() for node in relay.below.values()]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.one_of(ACTIONS, st.tuples(st.just("close"), st.integers(1, 2))), min_size=8, max_size=50),
    st.lists(st.integers(0, 99), min_size=1, max_size=20),
)
def test_routes_that_are_given_up_and_made_anew_keep_the_order(actions: list[Any], order: list[int]) -> None:
    check(play(actions, order))


def test_what_died_with_a_node_of_a_route_that_was_given_up_is_not_waited_for_for_ever() -> None:
    """Nobody sends it again, so after a while the rest is handled without it."""
    world = World()
    world.cast(0, 1)
    while world.step(0):
        pass
    world.cast(0, 1)
    parent = next(p for p in world.processes[1:] if any(r.below for r in p.relays._relays.values()))
    below = [node.process.id for relay in parent.relays._relays.values() for node in relay.below.values()]
    world.close(1)
    world.kill(world.processes.index(parent))
    world.say(world.processes.index(world.of[below[0]]), Call)
    while world.step(0):
        pass
    process = world.of[below[0]]
    assert process.seen == [1]
    later: Any = process.relays._loop
    for _ in range(6):
        due, later.later = later.later, []
        for call, arguments in due:
            call(*arguments)
    assert process.seen == [1, 3]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.one_of(ACTIONS, st.tuples(st.just("kill"), st.integers(1, SIZE - 1))), min_size=8, max_size=50),
    st.lists(st.integers(0, 99), min_size=1, max_size=20),
)
def test_of_a_caster_that_dies_nothing_comes_past_what_was_lost_with_it(actions: list[Any], order: list[int]) -> None:
    world = World()
    for name, *arguments in actions:
        getattr(world, name)(*arguments)
    world.kill(0)
    turn = 0
    while world.step(order[turn % len(order)] + turn):
        turn += 1
    for process in world.processes[1:]:
        later: Any = process.relays._loop
        for call, arguments in later.later:
            call(*arguments)
        if process.me.id not in world.dead:
            assert process.seen == world.said[process.me.id][: len(process.seen)], process.me.name


@given(st.permutations(range(1, 9)), st.integers(0, 8))
def test_numbers_come_out_in_order(numbers: list[int], begins_at: int) -> None:
    order: ArrivalOrder[str] = ArrivalOrder()
    out: list[str] = []
    for at, number in enumerate(numbers):
        if at == begins_at:
            order.begin()
        order.put(number, str(number))
        order.put(number, "again")
        while (thing := order.take()) is not None:
            out.append(thing)
    order.begin()
    while (thing := order.take()) is not None:
        out.append(thing)
    assert out == [str(number) for number in range(1, 9)]
    assert order.waits_for is None


def test_a_gap_is_known_and_can_be_skipped() -> None:
    order: ArrivalOrder[str] = ArrivalOrder()
    order.skip()
    order.put(3, "c")
    assert order.waits_for == 0
    order.begin()
    assert order.waits_for == 1
    order.skip()
    assert order.take() == "c"
    order.put(2, "late")
    assert order.take() is None
