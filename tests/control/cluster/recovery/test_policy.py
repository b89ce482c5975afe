"""What is decided about a failure, from its kind and from what was done before."""

import pytest

from skipper.control import FailureKind, HostMesh, MeshFailure
from skipper.control.cluster.recovery import Action, Attempt, Decision, Escalate, RecoveryPolicy, ReplaceHost, Restart


class Engine:
    """A job that counts how often it was asked."""

    def __init__(self) -> None:
        self.asked: list[float] = []

    def replace(self, *, timeout: float) -> HostMesh:
        self.asked.append(timeout)
        return HostMesh()


def failure(kind: FailureKind = FailureKind.PROCESS, cause: MeshFailure | None = None) -> MeshFailure:
    return MeshFailure("workers", "workers[0]", None, kind, "it died", cause=cause)


def restarts(*at_s: float) -> list[Attempt]:
    return [Attempt(Action.RESTART, each) for each in at_s]


def run(policy: RecoveryPolicy, at_s: list[float], what: MeshFailure) -> list[Decision]:
    """What is decided about failures at these times, one after the other."""
    history: list[Attempt] = []
    decisions = []
    for now_s in at_s:
        decisions.append(policy.decide(what, history, now_s))
        history.append(Attempt(decisions[-1].action, now_s))
    return decisions


def test_processes_are_restarted_first_then_a_host_is_asked_for_then_it_is_given_up() -> None:
    policy = RecoveryPolicy(
        process=Restart(attempts=2, within_s=60), host=ReplaceHost(Engine(), attempts=2, within_s=600)
    )
    decided = [decision.action for decision in run(policy, [float(now) for now in range(9)], failure())]
    restart, replace, give_up = Action.RESTART, Action.REPLACE_HOST, Action.ESCALATE
    assert decided == [restart, restart, replace, restart, restart, replace, restart, restart, give_up]


def test_attempts_that_are_long_ago_do_not_count() -> None:
    policy = RecoveryPolicy(process=Restart(attempts=2, within_s=10))
    decided = [decision.action for decision in run(policy, [0.0, 9.0, 9.9, 10.0], failure())]
    assert decided == [Action.RESTART, Action.RESTART, Action.ESCALATE, Action.RESTART]


def test_the_first_restart_does_not_wait_and_further_ones_wait_twice_as_long_up_to_a_bound() -> None:
    policy = RecoveryPolicy(process=Restart(attempts=9, within_s=60, backoff_s=0.5, longest_backoff_s=3))
    delays = [decision.delay_s for decision in run(policy, [0.0] * 6, failure())]
    assert delays == [0.0, 0.5, 1.0, 2.0, 3.0, 3.0]


def test_a_change_of_hosts_ends_the_back_off() -> None:
    policy = RecoveryPolicy(process=Restart(attempts=2, backoff_s=5.0), host=ReplaceHost(Engine()))
    assert policy.decide(failure(), restarts(0.0), 3.0).delay_s == 5.0
    decision = policy.decide(failure(), [*restarts(0.0, 1.0), Attempt(Action.REPLACE_HOST, 2.0)], 3.0)
    assert (decision.action, decision.delay_s) == (Action.RESTART, 0.0)


def test_the_restarts_after_a_host_that_could_not_be_had_are_not_new_ones() -> None:
    policy = RecoveryPolicy(process=Restart(attempts=2), host=ReplaceHost(Engine(), attempts=2, backoff_s=5.0))
    history = [*restarts(0.0, 1.0), Attempt(Action.REPLACE_HOST, 2.0, is_done=False)]
    again = policy.decide(failure(), history, 3.0)
    assert (again.action, again.delay_s) == (Action.REPLACE_HOST, 5.0)
    history.append(Attempt(Action.REPLACE_HOST, 8.0, is_done=False))
    assert policy.decide(failure(), history, 9.0).action is Action.ESCALATE


def test_nothing_is_restarted_on_a_lost_host_where_another_one_can_be_had() -> None:
    policy = RecoveryPolicy(process=Restart(), host=ReplaceHost(Engine()))
    assert policy.decide(failure(), [], 0.0, is_host_lost=True).action is Action.REPLACE_HOST
    assert RecoveryPolicy().decide(failure(), [], 0.0, is_host_lost=True).action is Action.RESTART


def test_a_policy_without_hosts_gives_up_after_the_restarts() -> None:
    policy = RecoveryPolicy(process=Restart(attempts=1))
    assert policy.decide(failure(), restarts(0.0), 1.0).action is Action.ESCALATE


def test_a_policy_without_restarts_asks_for_a_host_at_once_and_says_whom() -> None:
    engine = Engine()
    decision = RecoveryPolicy(process=None, host=ReplaceHost(engine, timeout_s=7.0)).decide(failure(), [], 0.0)
    assert decision.action is Action.REPLACE_HOST
    assert decision.replace is not None
    decision.replace.ask()
    assert engine.asked == [7.0]


def test_what_failed_in_its_constructor_is_not_started_again() -> None:
    policy = RecoveryPolicy(host=ReplaceHost(Engine()))
    broken = failure(FailureKind.CONSTRUCTION)
    assert policy.decide(broken, [], 0.0).action is Action.ESCALATE
    assert policy.decide(failure(FailureKind.OWNED, cause=broken), [], 0.0).action is Action.ESCALATE


@pytest.mark.parametrize("kind", [kind for kind in FailureKind if kind is not FailureKind.CONSTRUCTION])
def test_every_other_kind_of_failure_is_restarted_by_default(kind: FailureKind) -> None:
    assert RecoveryPolicy().decide(failure(kind), [], 0.0).action is Action.RESTART


def test_a_kind_of_failure_can_have_a_ladder_of_its_own_chosen_by_the_first_failure() -> None:
    policy = RecoveryPolicy(
        kinds={
            FailureKind.EXCEPTION: (Escalate(),),
            FailureKind.UNREACHABLE: (ReplaceHost(Engine(), attempts=1),),
            FailureKind.CONSTRUCTION: (Restart(attempts=1),),
        }
    )
    assert policy.decide(failure(FailureKind.PROCESS), [], 0.0).action is Action.RESTART
    assert policy.decide(failure(FailureKind.EXCEPTION), [], 0.0).action is Action.ESCALATE
    assert policy.decide(failure(FailureKind.CONSTRUCTION), [], 0.0).action is Action.RESTART
    lost = failure(FailureKind.OWNED, cause=failure(FailureKind.UNREACHABLE))
    assert policy.decide(lost, [], 0.0).action is Action.REPLACE_HOST
    assert policy.decide(lost, [Attempt(Action.REPLACE_HOST, 0.0)], 1.0).action is Action.ESCALATE


def test_only_what_can_still_matter_of_a_history_is_remembered() -> None:
    policy = RecoveryPolicy(process=Restart(within_s=10), kinds={FailureKind.EXCEPTION: (Restart(within_s=100),)})
    assert policy.remembered(restarts(0.0, 50.0, 99.0), 100.0) == restarts(50.0, 99.0)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Restart(attempts=0), ValueError),
        (lambda: Restart(attempts=True), TypeError),
        (lambda: Restart(within_s=0), ValueError),
        (lambda: Restart(backoff_s=-1), ValueError),
        (lambda: ReplaceHost(Engine(), attempts=0), ValueError),
        (lambda: ReplaceHost(Engine(), timeout_s=0), ValueError),
    ],
)
def test_a_strategy_that_makes_no_sense_is_refused(make: "object", error: type[Exception]) -> None:
    with pytest.raises(error):
        make()
