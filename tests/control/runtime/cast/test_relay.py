"""When answers go up a tree: with which others, and how long they wait for these. On a clock of the tests' own."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from typing import Any, cast

from skipper.control.runtime.cast.messages import Opening, host_starts, unpack_answers
from skipper.control.runtime.cast.relay import Relay
from skipper.control.runtime.cast.route import Route
from skipper.control.runtime.messages import Mail
from skipper.control.wire.messages import Call, Cast, CastAnswers, Kind, Message, RouteCut, RouteOpened
from skipper.control.wire.process_ref import ProcessRef

ROOT = ProcessRef("job-0", "127.1.0.1:1", "script")
HOP_S = 100e-6
QUIET_S = 0.005
"""What answers wait at most for a rank of which nothing is heard, where they came quickly themselves."""


class Clock:
    """The loop of all nodes, whose time goes on when the test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = itertools.count()

    def time(self) -> float:
        return self.now_s

    def call_at(self, when_s: float, call: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._due, (when_s, next(self._count), call, args))

    def call_soon_threadsafe(self, call: Callable[..., None], *args: Any) -> None:
        self.call_at(self.now_s, call, *args)

    def run(self, until_s: float) -> None:
        while self._due and self._due[0][0] <= until_s:
            when_s, _, call, args = heapq.heappop(self._due)
            self.now_s = max(self.now_s, when_s)
            call(*args)
        self.now_s = until_s


class Tree:
    """A caster and relays for so many hosts, with one process each; a message takes `HOP_S` from one to another."""

    def __init__(self, hosts: int, fanout: int = 8) -> None:
        self.clock = Clock()
        members = tuple(
            ProcessRef(f"job-{n + 1}", f"127.2.{n // 250}.{n % 250 + 1}:1", f"p[{n}]", ROOT) for n in range(hosts)
        )
        self.members = members
        self.route = Route(1, ROOT, members, tuple(enumerate(members)), [(0, False)] * hosts, fanout, ())
        self.relays: dict[str, Relay] = {}
        self.came: list[tuple[float, list[int]]] = []
        """What reached the caster: when, and of which ranks."""
        self._calls: dict[int, Call] = {}
        for span in self.route.tree.heads:
            self.pass_on(members[span.first], self.route.opening(span).message(), ROOT)
        self.clock.run(self.clock.now_s + 1)

    def cast(self) -> None:
        """Cast once more; every actor has it when this returns."""
        self.came.clear()
        self._calls.clear()
        self.route.cast(Call(7, 3, method="run", payload=(b"",)), (), 1, lambda port: True)
        for position in self.route.heads:
            self.pass_on(self.members[position], self.route.newest(self.route.tree.span_at[position]), ROOT)
        self.clock.run(self.clock.now_s + 10 * HOP_S)
        assert len(self._calls) == len(self.members)

    def answer(self, rank: int, after_s: float = 0.0, kind: Kind = Kind.REPLY) -> None:
        """Have an actor answer the cast, in a while."""
        relay = self.relays[self.members[rank].id]
        at_s = self.clock.now_s + after_s
        self.clock.call_at(at_s, relay.reply, self.route.last, self._calls[rank], kind, (b"answer",))

    def pass_on(self, to: ProcessRef, message: Message, by: ProcessRef) -> None:
        self.clock.call_at(self.clock.now_s + HOP_S, self._arrive, to, message, by)

    def _arrive(self, to: ProcessRef, message: Message, by: ProcessRef) -> None:
        if isinstance(message, RouteOpened):
            sender = _SenderOf(self, to)
            relay = Relay(sender, cast("Any", self), cast("Any", self.clock), Opening.of(message), by)
            self.relays[to.id] = relay
            opening = Opening.of(message)
            for span in opening.span.below(opening.fanout, host_starts(opening.nodes, opening.span.first)):
                self.pass_on(self.members[span.first], opening.part(span).message(), to)
        elif isinstance(message, Cast):
            taken = self.relays[to.id].take(message)
            assert taken is not None
            taken[1].deliver()
        elif isinstance(message, CastAnswers):
            answers = unpack_answers(message)
            if to.id == ROOT.id:
                self.came.append((self.clock.now_s, [answer.rank for answer in answers]))
            else:
                self.relays[to.id].gather(by.id, message.port, message.number, answers)

    def deliver(self, mail: Mail) -> None:
        """An actor has the cast."""
        assert isinstance(mail.message, Call)
        self._calls[mail.message.rank] = mail.message


class _SenderOf:
    """What one process sends."""

    def __init__(self, tree: Tree, me: ProcessRef) -> None:
        self._tree = tree
        self._me = me

    def send(self, to: ProcessRef, message: Message) -> None:
        raise AssertionError("a relay sends nothing straight")

    def pass_on(self, to: ProcessRef, message: Message) -> Any:
        self._tree.pass_on(to, message, self._me)
        return True


def ranks_that_came(tree: Tree) -> list[int]:
    return sorted(rank for _, ranks in tree.came for rank in ranks)


def test_answers_that_come_together_are_one_message_of_each_head() -> None:
    tree = Tree(1024)
    for _ in range(3):
        tree.cast()
        for rank in range(1024):
            tree.answer(rank, random.Random(rank).uniform(0, 0.002))
        tree.clock.run(tree.clock.now_s + 0.1)
        assert ranks_that_came(tree) == list(range(1024))
        assert len(tree.came) == 8


def test_no_answer_waits_long_for_a_slow_host_wherever_that_is() -> None:
    tree = Tree(1024)
    head, middle = tree.route.tree.heads[3].first, tree.route.tree.below(tree.route.tree.heads[3].first)[2].first
    leaf = tree.route.tree.below(middle)[-1].first
    for slow in (head, middle, leaf):
        tree.cast()
        began_s = tree.clock.now_s
        for rank in range(1024):
            tree.answer(rank, 10.0 if rank == slow else 0.001)
        tree.clock.run(began_s + 5)
        assert ranks_that_came(tree) == [rank for rank in range(1024) if rank != slow]
        assert max(at_s for at_s, _ in tree.came) < began_s + 0.001 + QUIET_S + 0.002
        assert len(tree.came) <= 8 + 2
        tree.clock.run(began_s + 11)
        assert ranks_that_came(tree) == list(range(1024))


def test_answers_that_come_bit_by_bit_are_few_messages_and_none_waits_long() -> None:
    tree = Tree(1024)
    tree.cast()
    began_s, chance = tree.clock.now_s, random.Random(5)
    answered_s = [chance.uniform(0, 0.5) for _ in range(1024)]
    for rank, after_s in enumerate(answered_s):
        tree.answer(rank, after_s)
    tree.clock.run(began_s + 1)
    assert ranks_that_came(tree) == list(range(1024))
    assert len(tree.came) <= 8 * 10
    assert max(at_s - began_s - answered_s[rank] for at_s, ranks in tree.came for rank in ranks) < 0.26


def test_a_failure_goes_up_at_once_with_what_is_there() -> None:
    tree = Tree(16, fanout=2)
    leaf = max(range(16), key=lambda rank: tree.route.tree.span_at[rank].first)
    tree.cast()
    began_s = tree.clock.now_s
    tree.answer(leaf, kind=Kind.FAILURE)
    tree.clock.run(began_s + QUIET_S / 2)
    assert ranks_that_came(tree) == [leaf]


def test_nobody_waits_for_a_node_that_is_passed_on_to_no_more() -> None:
    tree = Tree(20, fanout=4)
    head = tree.route.tree.heads[0].first
    dropped = tree.route.tree.below(head)[-1]
    tree.cast()
    for rank in range(20):
        if not dropped.first <= rank < dropped.end:
            tree.answer(rank)
    tree.clock.run(tree.clock.now_s + 10 * HOP_S)
    assert head not in ranks_that_came(tree)
    cut = RouteCut(1, tree.members[dropped.first].id)
    tree.relays[tree.members[head].id].drop(cut.process)
    tree.clock.run(tree.clock.now_s + 2 * HOP_S)
    assert head in ranks_that_came(tree)


def test_a_cast_that_takes_long_holds_up_no_answer_to_the_next() -> None:
    tree = Tree(20, fanout=4)
    tree.cast()
    first, calls = tree.route.last, dict(tree._calls)
    head = tree.route.tree.heads[0].first
    below = [span.first for span in tree.route.tree.below(head)]
    tree.clock.run(tree.clock.now_s + 2)
    tree.relays[tree.members[head].id].reply(first, calls[head], Kind.REPLY, (b"late",))  # it waits for others
    tree.cast()
    began_s = tree.clock.now_s
    for rank in (head, *below[:-1]):
        tree.answer(rank)
    tree.clock.run(began_s + QUIET_S + 0.003)
    assert set(ranks_that_came(tree)) >= {head, *below[:-1]}
