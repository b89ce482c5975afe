"""No version mixes steps, loses a share or is waited for in vain: every interleaving of small worlds, and larger ones.

The core is pure: shares come in some order, and what becomes of them is compared with what each rank has put.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Literal

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from skipper.torchstore.algebra.layout import Layout, Shard
from skipper.torchstore.algebra.manifest import Binding, Manifest, MeshPosition, Mode, TensorItem
from skipper.torchstore.controller.history import History
from skipper.torchstore.controller.steps import MAX_AHEAD
from skipper.torchstore.controller.version import Contribution, Version
from skipper.torchstore.errors import (
    LateShareError,
    OutOfStepError,
    ReplicaMismatchError,
    ShareMismatchError,
    StoreError,
    VersionExistsError,
)
from skipper.torchstore.protocol.messages import Selector
from skipper.torchstore.protocol.origin import Origin, Turn
from skipper.torchstore.support.process import ProcessId
from tests.torchstore.controller.test_history import manifest

RANKS, STEPS = 3, 3
READER = ProcessId("here", 900, 1)
Kind = Literal["parts", "replicas"]
Event = tuple[int, str]  # a rank, and what it does: "put", "die" or "start again"


def process(rank: int, life: int = 0) -> ProcessId:
    return ProcessId("here", 100 + rank, life)


@cache
def described(kind: Kind, rank: int, ranks: int, *, empty: bool = False) -> Manifest:
    if empty:
        return Manifest.of("value", MeshPosition(), {}, (), {})
    if kind == "parts":
        return manifest(Layout((ranks,), (ranks,), (Shard(0),)), (rank,))
    whole = Layout((4,))
    item = TensorItem("torch.float32", (4,), whole.pieces(()), 0, 0, (4,), 4)
    return Manifest.of("value", MeshPosition(), {"": item}, (), {})


@cache
def share(
    rank: int,
    step: int,
    *,
    mode: Mode = "snapshot",
    kind: Kind = "parts",
    ranks: int = RANKS,
    group: str = "first",
    life: int = 0,
    number: int | None = None,
    empty: bool = False,
) -> Contribution:
    """What a rank puts in a step; ``generation`` says the step, as the bytes would."""
    memory = f"{group} {rank} {life}" + ("" if mode == "direct" else f" {step}")
    alone = None if empty else kind == "replicas"
    return Contribution(
        process(rank, life),
        MeshPosition(),
        described(kind, rank, ranks, empty=empty),
        None if empty else Binding(memory, mode, "v0" if mode == "snapshot" else "", ()),
        generation=step,
        turn=Turn(Origin(group, rank, ranks), f"{group} {rank} {life}", number or step, alone),
    )


def steps_of(version: Version) -> set[int]:
    return {contribution.generation for contribution in version.contributions.values()}


def interleavings(left: tuple[tuple[Event, ...], ...]) -> Iterator[tuple[Event, ...]]:
    """Every order of these events that keeps the order of each rank."""
    if not any(left):
        yield ()
    for at, events in enumerate(left):
        if events:
            for rest in interleavings((*left[:at], events[1:], *left[at + 1 :])):
                yield (events[0], *rest)


def schedules(*victims: int) -> Iterator[tuple[Event, ...]]:
    """Three ranks that put three steps; one of these dies, at any moment."""
    alive = tuple(tuple((rank, "put") for _ in range(STEPS)) for rank in range(RANKS))
    if not victims:
        yield from interleavings(alive)
    for victim in victims:
        for puts in range(STEPS + 1):
            last = (*(((victim, "put"),) * puts), (victim, "die"))
            yield from interleavings((*alive[:victim], last, *alive[victim + 1 :]))


def play(events: tuple[Event, ...], mode: Mode, kind: Kind) -> None:
    """Let it happen, and compare what there is to be read with what was put."""
    history = History("w", keep=STEPS)
    done, refused, freed = dict.fromkeys(range(RANKS), 0), set[tuple[int, int]](), set[str]()
    died, put_before_death = set[int](), STEPS
    for rank, what in events:
        if what == "die":
            history.process_died(process(rank), "killed")
            died.add(rank)
            put_before_death = done[rank]
        else:
            done[rank] += 1
            try:
                history.contribute(share(rank, done[rank], mode=mode, kind=kind), None)
            except LateShareError:
                refused.add((rank, done[rank]))
        for version in history.ready.values():
            assert len(steps_of(version)) == 1
            assert kind == "replicas" or mode == "direct" or len(version.contributions) == RANKS
        freed.update(binding.id for _, binding in history.reap())
    assert mode == "direct" or all(step > put_before_death for _, step in refused)
    assert not refused or died
    waited_for = {rank for version in history.staging.values() if version.step for rank in version.step.absent()}
    assert waited_for <= (set() if put_before_death else died), "only who was never seen can be waited for"
    whole = [next(iter(steps_of(version))) for _, version in sorted(history.ready.items())]
    if mode == "direct":
        assert whole == sorted(whole)
        assert died or whole[-1] == STEPS
        return
    assert whole == list(range(1, (STEPS if kind == "replicas" else put_before_death) + 1))
    used = {binding.id for version in history.ready.values() for _, binding in version.bindings()}
    taken = {(r, s) for r in done for s in range(1, done[r] + 1)} - refused
    used |= {binding.id for version in history.staging.values() for _, binding in version.bindings()}
    assert used | freed == {f"first {r} 0 {s}" for r, s in taken}, "memory was lost"


@pytest.mark.parametrize("kind", ["parts", "replicas"])
@pytest.mark.parametrize("mode", ["snapshot", "direct"])
def test_every_interleaving_of_three_ranks_and_three_steps(mode: Mode, kind: Kind) -> None:
    played = 0
    for events in schedules():
        play(events, mode, kind)
        played += 1
    assert played == 1680


@pytest.mark.parametrize(
    ("mode", "kind", "victims"),
    [("snapshot", "parts", (0, 1, 2)), ("direct", "parts", (0,)), ("snapshot", "replicas", (2,))],
)
def test_every_interleaving_with_a_death(mode: Mode, kind: Kind, victims: tuple[int, ...]) -> None:
    played = 0
    for events in schedules(*victims):
        play(events, mode, kind)
        played += 1
    assert played == 6580 * len(victims)


def test_every_interleaving_with_a_rank_that_is_started_again_mixes_nothing() -> None:
    """It begins with its first step, whatever the others are at; its session is another one."""
    played = whole = 0
    alive: list[tuple[Event, ...]] = [tuple((rank, "put") for _ in range(2)) for rank in range(1, RANKS)]
    for puts in range(3):
        again: tuple[Event, ...] = (*(((0, "put"),) * puts), (0, "die"), (0, "start again"), (0, "put"))
        for events in interleavings((again, *alive)):
            history, done, life = History("w", keep=9), dict.fromkeys(range(RANKS), 0), 0
            for rank, what in events:
                if what == "die":
                    history.process_died(process(0), "killed")
                    life, done[0] = 1, 0
                    continue
                done[rank] += 1
                try:
                    history.contribute(share(rank, done[rank], life=0 if rank else life), None)
                except LateShareError:
                    continue
                for version in history.ready.values():
                    assert len(steps_of(version)) == 1
                    assert len(version.contributions) == RANKS
            played += 1
            whole += len(history.ready)
    assert played > 1000
    assert whole > 0


def test_a_share_that_is_sent_twice_is_taken_once() -> None:
    history = History("w")
    for rank in (0, 0, 1, 2, 2, 0):
        history.contribute(share(rank, 1), None)
    assert set(history.ready) == {1}
    assert history.staging == {}
    assert history.reap() == []


def test_ranks_of_another_group_are_not_matched_with_those_that_are_left() -> None:
    history = History("w", keep=9)
    for rank in range(RANKS):
        history.contribute(share(rank, 1), None)
    history.contribute(share(0, 2), None)
    history.process_died(process(2), "killed")
    with pytest.raises(LateShareError, match="rank 2 of 3 is gone: killed"):
        history.contribute(share(1, 2), None)
    for rank in range(2):
        version = history.contribute(share(rank, 1, group="second", ranks=2), None)
    assert steps_of(version) == {1}
    assert (version.number, sorted(history.ready)) == (3, [1, 3])


def test_a_rank_that_was_started_again_joins_with_a_number_that_says_where_it_is() -> None:
    history = History("w", keep=9)
    for rank in range(RANKS):
        history.contribute(share(rank, 1), None)
    history.contribute(share(0, 2), 2)
    history.contribute(share(1, 2), 2)
    history.contribute(share(2, 2, life=1, number=1), 2)
    assert steps_of(history.ready[2]) == {2}
    assert len(history.ready[2].contributions) == RANKS
    with pytest.raises(LateShareError, match="started again"):  # the process that was there before
        history.contribute(share(2, 2), None)


def test_ranks_may_be_so_many_steps_apart() -> None:
    history = History("w")
    for step in range(1, MAX_AHEAD + 1):
        history.contribute(share(0, step), None)
    with pytest.raises(OutOfStepError, match=f"rank 0 of 3 is at step {MAX_AHEAD + 1}, but rank 1, 2 of 3 .* step 1"):
        history.contribute(share(0, MAX_AHEAD + 1), None)


def test_a_late_replica_is_welcome_and_changes_nothing() -> None:
    history = History("w")
    for step in (1, 2, 3):
        history.contribute(share(0, step, kind="replicas"), None)
    for rank, step in ((1, 3), (2, 1)):
        assert history.contribute(share(rank, step, kind="replicas"), None).number == step
    assert set(history.ready[3].contributions) == {0}
    assert {binding.id for _, binding in history.reap()} == {"first 0 0 1", "first 0 0 2", "first 1 0 3", "first 2 0 1"}


def test_a_replica_in_direct_mode_serves_on_when_another_dies() -> None:
    history = History("w")
    for rank in (0, 1):
        history.contribute(share(rank, 1, mode="direct", kind="replicas"), None)
    history.process_died(process(0), "killed")
    version = history.select(Selector())
    assert version is not None
    assert set(version.contributions) == {1}


def test_parts_and_replicas_in_one_step_are_refused_and_an_empty_share_is_either() -> None:
    for first, second in (("parts", "replicas"), ("replicas", "parts")):
        history = History("w")
        history.contribute(share(2, 1, empty=True), None)
        history.contribute(share(0, 1, kind=first), None)  # type: ignore[arg-type]
        with pytest.raises(ShareMismatchError, match="publisher="):
            history.contribute(share(1, 1, kind=second), None)  # type: ignore[arg-type]
        assert history.staging == {}


def test_replicas_that_differ_are_named_and_not_published() -> None:
    history = History("w")

    def holding(rank: int, digest: bytes) -> Contribution:
        return replace(share(rank, 1), digests={("w", (0,), (4,)): digest})

    history.contribute(holding(0, b"one"), None)
    with pytest.raises(ReplicaMismatchError, match=r"ranks 0 and 2 .* w\[offsets \(0,\), shape \(4,\)\]") as raised:
        history.contribute(holding(2, b"other"), None)
    assert (raised.value.name, raised.value.box, raised.value.ranks) == ("w", ((0,), (4,)), (0, 2))
    assert (history.ready, history.staging) == ({}, {})
    with pytest.raises(LateShareError, match="different bytes"):
        history.contribute(holding(1, b"one"), None)


class Store(RuleBasedStateMachine):
    """One key, groups that come and go, readers: in any order."""

    @initialize(mode=st.sampled_from(["snapshot", "direct"]), kind=st.sampled_from(["parts", "replicas"]))
    def begin(self, mode: Mode, kind: Kind) -> None:
        self.history = History("w", keep=2)
        self.mode, self.kind = mode, kind
        self.groups = 0
        self.leases: dict[int, Version] = {}
        self.last: dict[int, Contribution] = {}
        self.highest = 0
        self.new_group(RANKS)

    @rule(ranks=st.integers(2, 4))
    def new_group(self, ranks: int) -> None:
        """Whoever is dead is replaced, and all meet anew."""
        self.groups += 1
        self.ranks = ranks
        self.done = dict.fromkeys(range(ranks), 0)
        self.dead: set[int] = set()
        self.seen: set[int] = set()  # who has put since the key was deleted: who dies unseen is not known to have died
        self.last = {}

    @rule(rank=st.integers(0, 3))
    def put(self, rank: int) -> None:
        """The next put of a rank."""
        if rank >= self.ranks or rank in self.dead:
            return
        self.done[rank] += 1
        self.last[rank] = self.share_of(rank)
        self.seen.add(rank)
        try:
            self.history.contribute(self.last[rank], None)
        except LateShareError:
            assert self.dead or self.is_disturbed
        except OutOfStepError:
            assert self.done[rank] - min(self.done.values()) >= MAX_AHEAD

    @precondition(lambda self: self.last)
    @rule(data=st.data())
    def put_again(self, data: st.DataObject) -> None:
        """The answer was lost: the same share is sent once more, and nothing changes."""
        rank = data.draw(st.sampled_from(sorted(self.last)))
        before = sorted(self.history.ready), sorted(self.history.staging)
        with suppress(LateShareError, VersionExistsError, OutOfStepError):
            self.history.contribute(self.last[rank], None)
        if not self.is_disturbed:
            assert (sorted(self.history.ready), sorted(self.history.staging)) == before

    @rule(rank=st.integers(0, 3))
    def die(self, rank: int) -> None:
        if rank < self.ranks and rank not in self.dead:
            self.dead.add(rank)
            self.last.pop(rank, None)
            self.history.process_died(process(rank, self.groups), "killed")

    @rule(exact=st.booleans())
    def read(self, exact: bool) -> None:
        newest = self.history.newest
        try:
            found = self.history.select(Selector(newest.number if exact and newest is not None else None))
        except StoreError:
            return
        if found is not None:
            assert found.number in self.history.ready
            self.leases[self.history.lease(found, READER)] = found

    @precondition(lambda self: self.leases)
    @rule()
    def release(self) -> None:
        lease, _ = self.leases.popitem()
        self.history.release(lease)

    @rule()
    def delete(self) -> None:
        self.history.delete()
        self.highest, self.disturbed_in, self.seen = 0, self.groups, set()

    @precondition(lambda self: len(self.history.ready) > 1)
    @rule()
    def roll_back(self) -> None:
        number = min(self.history.ready)
        try:
            self.history.rollback(number)
        except StoreError:
            return
        self.disturbed_in = self.groups

    disturbed_in = 0

    @property
    def is_disturbed(self) -> bool:
        """Whether steps of this group were taken away from under it."""
        return self.disturbed_in == self.groups

    def share_of(self, rank: int) -> Contribution:
        step = self.done[rank]
        return share(
            rank, step, mode=self.mode, kind=self.kind, ranks=self.ranks, group=f"{self.groups}", life=self.groups
        )

    @invariant()
    def versions_are_whole_and_of_one_step_of_one_group(self) -> None:
        for version in [*self.history.ready.values(), *self.leases.values()]:
            said = {(c.turn.origin.group, c.generation) for c in version.contributions.values()}
            assert len(said) == 1
            if self.kind == "parts" and version.lost is None:
                assert not version.missing()

    @invariant()
    def what_is_in_the_making_can_still_be_whole(self) -> None:
        for version in self.history.staging.values():
            assert version.step is not None
            assert version.step.is_open
            is_of_these = next(iter(version.contributions.values())).turn.origin.group == f"{self.groups}"
            assert not (is_of_these and self.dead & self.seen & set(version.step.absent()))

    @invariant()
    def what_is_read_is_not_freed(self) -> None:
        freed = {binding.id for _, binding in self.history.reap()}
        held = {binding.id for version in self.leases.values() for _, binding in version.bindings()}
        assert not freed & held

    @invariant()
    def numbers_go_up(self) -> None:
        newest = max(self.history.ready, default=0)
        if not self.is_disturbed:
            assert newest >= self.highest or not self.history.ready
        self.highest = newest


Store.TestCase.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
test_groups_readers_deaths_and_retries_in_any_order = Store.TestCase
