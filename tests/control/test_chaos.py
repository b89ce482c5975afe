"""A few seconds of `chaos`; ``python -m tests.control.chaos`` goes on for longer."""

from skipper import control
from skipper.control import this_proc

from . import chaos
from .conftest import PATIENCE_S, Failures


def has_seen_enough(outcome: chaos.Outcome) -> bool:
    return (
        outcome.answered > 500
        and outcome.refused > 0
        and outcome.cast > 50
        and outcome.killed["crowd"] > 0
        and outcome.killed.total() > 3
    )


def test_no_call_is_lost_doubled_or_out_of_order_while_actors_and_processes_die(failures: Failures) -> None:
    outcome = chaos.run(3.0, seed=3, pause_s=(0.05, 0.3), is_enough=has_seen_enough)
    assert outcome.violations == []
    assert has_seen_enough(outcome)
    assert control.unhandled_fault_hook == failures.append


def test_a_gap_a_duplicate_and_a_wrong_order_would_be_noticed() -> None:
    leaf = this_proc().spawn("leaf", chaos.Leaf)
    complaints = [leaf.step.call_one("me", number).get(PATIENCE_S)[1] for number in (0, 1, 1, 3, 2)]
    assert complaints == [
        "",
        "",
        "me: 1 came where 2 was to come",
        "me: 3 came where 2 was to come",
        "me: 2 came where 4 was to come",
    ]
    leaf.stop().get(PATIENCE_S)
