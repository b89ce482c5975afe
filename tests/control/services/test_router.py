"""Routing, and what may be sent again: no process is started."""

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from skipper.control import SupervisionError
from skipper.control.api.service import ReplicaState
from skipper.control.model.actor import interface_of
from skipper.control.services.router import KnownReplica, Router
from skipper.control.services.service_client import may_retry
from skipper.control.services.table import ReplicaSlot, ReplicaTable
from tests.control.services.parties import Worker


@dataclass(frozen=True)
class Mesh:
    """What of a mesh of actors the router looks at."""

    uid: int


def table(states: dict[int, ReplicaState], *, life: int = 0) -> ReplicaTable:
    """Replicas of these numbers and states; those of another life are other ones."""
    return ReplicaTable(0, tuple(ReplicaSlot(number, state, mesh(number, life)) for number, state in states.items()))


def mesh(number: int, life: int = 0) -> Any:
    return Mesh(100 * life + number)


def router(count: int) -> Router:
    made = Router()
    made.update(table(dict.fromkeys(range(count), ReplicaState.READY)))
    return made


def choose(chosen_by: Router) -> KnownReplica:
    replica = chosen_by.choose()
    assert replica is not None
    return replica


def test_requests_go_to_the_replica_with_the_fewest_outstanding() -> None:
    chance, made = random.Random(1), router(5)
    under_way: list[KnownReplica] = []
    for _ in range(2000):
        if under_way and chance.random() < 0.45:
            under_way.pop(chance.randrange(len(under_way))).outstanding -= 1
        fewest = min(replica.outstanding for number in range(5) if (replica := made.replica(number)))
        replica = choose(made)
        assert replica.outstanding == fewest
        replica.outstanding += 1
        under_way.append(replica)


def test_replicas_that_have_equally_much_to_do_take_turns() -> None:
    made = router(4)
    assert set(Counter(choose(made).number for _ in range(400)).values()) == {100}


@pytest.mark.parametrize(
    "state", [ReplicaState.STARTING, ReplicaState.UNHEALTHY, ReplicaState.DRAINING, ReplicaState.UPDATING]
)
def test_a_replica_that_is_not_ready_gets_nothing_while_another_is(state: ReplicaState) -> None:
    made = Router()
    made.update(table({0: state, 1: ReplicaState.READY}))
    choose(made).outstanding = 50
    assert {choose(made).number for _ in range(5)} == {1}


def test_a_replica_that_is_updated_gets_requests_when_no_other_can() -> None:
    made = Router()
    made.update(table({0: ReplicaState.UPDATING, 1: ReplicaState.DRAINING, 2: ReplicaState.STARTING}))
    assert choose(made).number == 0


def test_there_is_nobody_to_choose_where_nobody_is_ready() -> None:
    made = Router()
    assert made.choose() is None
    assert made.choose_for_session() is None
    made.update(table({0: ReplicaState.STARTING, 1: ReplicaState.DRAINING}))
    assert made.choose() is None


def test_a_replica_that_is_lost_here_is_left_out_until_another_has_its_number() -> None:
    made = router(2)
    lost = made.replica(0)
    assert lost is not None
    made.lose(lost)
    made.update(table({0: ReplicaState.READY, 1: ReplicaState.READY}))  # the controller does not know of it yet
    assert {choose(made).number for _ in range(5)} == {1}
    assert made.replica(0) is None
    assert not lost.takes_sessions()
    made.update(table({0: ReplicaState.READY}, life=1))
    assert choose(made) is not lost
    assert made.replica(0) is choose(made)


def test_a_replica_whose_number_another_has_is_known_to_be_lost() -> None:
    made = router(1)
    first = choose(made)
    made.update(table({0: ReplicaState.STARTING}, life=1))
    assert first.is_lost


def test_what_is_with_a_replica_is_known_after_a_change_of_its_state() -> None:
    made = router(2)
    replica = choose(made)
    replica.outstanding = 3
    made.update(table({0: ReplicaState.READY, 1: ReplicaState.UPDATING}))
    assert replica.outstanding == 3
    assert made.replica(replica.number) is replica


def test_sessions_are_spread_by_their_number_and_then_by_requests() -> None:
    made = router(3)
    for number, (sessions, outstanding) in enumerate([(1, 0), (0, 5), (0, 2)]):
        replica = made.replica(number)
        assert replica is not None
        replica.sessions, replica.outstanding = sessions, outstanding
    chosen = made.choose_for_session()
    assert chosen is not None
    assert chosen.number == 2


def test_counts_of_a_number_go_on_and_those_of_the_moment_begin_anew_with_its_next_replica() -> None:
    made = router(1)
    replica = choose(made)
    replica.outstanding, replica.sessions, replica.tally.done = 2, 1, 7
    assert (made.tallies()[0].outstanding, made.tallies()[0].sessions, made.tallies()[0].done) == (2, 1, 7)
    made.update(table({0: ReplicaState.READY}, life=1))
    assert (made.tallies()[0].outstanding, made.tallies()[0].sessions, made.tallies()[0].done) == (0, 0, 7)


@pytest.mark.parametrize(
    ("endpoint", "is_unhandled", "attempts", "expected"),
    [
        ("double", False, 1, True),
        ("double", False, 3, True),
        ("double", False, 4, False),
        ("double", True, 99, True),
        ("note", False, 1, False),
        ("note", True, 99, True),
        ("wait_again_for", False, 1, True),  # marked above its @endpoint
    ],
)
def test_what_is_idempotent_or_surely_was_not_handled_is_sent_again(
    endpoint: str, is_unhandled: bool, attempts: int, expected: bool
) -> None:
    spec = interface_of(Worker).endpoints[endpoint]
    error = SupervisionError("gone", is_unhandled=is_unhandled)
    assert may_retry(spec, error, attempts, 3) is expected


def test_a_service_is_out_of_reach_where_every_replica_is_up_and_lost_to_this_process_alone() -> None:
    made = router(2)
    assert not made.is_out_of_reach()
    for number in (0, 1):
        assert not made.is_out_of_reach()
        replica = made.replica(number)
        assert replica is not None
        made.lose(replica)
        replica.is_out_of_reach = True
        assert made.is_out_of_reach(number)
    assert made.is_out_of_reach()
    made.update(table({0: ReplicaState.READY, 1: ReplicaState.DOWN}, life=1))
    assert not made.is_out_of_reach()
    assert not Router().is_out_of_reach()
