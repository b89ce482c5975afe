"""A few seconds of `chaos` and of `churn`; ``python -m tests.control.services.chaos`` goes on for longer."""

from collections import Counter
from pathlib import Path

from tests.control.services import chaos, churn


def test_no_request_is_lost_without_an_error_while_replicas_die() -> None:
    outcome, killed, metrics = chaos.run(2.0, seed=3, every_s=0.3)
    assert outcome.wrong == []
    assert outcome.doubled > 500
    assert killed > 2
    assert sum(each.restarts for each in metrics) >= killed - 1  # the last may not have been noticed yet


def test_what_is_handled_twice_or_told_wrongly_would_be_noticed(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    ledger.write_text("a\nb\nb\nc\n")
    outcome = chaos.Outcome(noted=["a", "d"], lost=["b"], refused=["c"])
    chaos.judge(outcome, ledger)
    assert Counter(outcome.wrong) == Counter(
        ["b was handled 2 times", "d was answered and not handled", "c was said not to be handled, and was"]
    )


def test_under_churn_only_what_was_begun_is_refused_and_updates_end() -> None:
    seen = churn.run(3.0, seed=5, every_s=0.3)
    assert seen.wrong == []
    assert len(seen.answered) > 50
    assert seen.killed >= 5
    assert seen.updates_s


def test_a_request_that_is_refused_or_begun_twice_under_churn_would_be_noticed(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    ledger.write_text("a\nb\nb\n")
    seen = churn.Churn(answered=["a", "c"], refused=["b", "d", "e"])
    seen.judge(ledger)
    assert Counter(seen.wrong) == Counter(
        ["b was begun 2 times", "c was answered and never begun", "2 of 3 refused requests had not been begun: d, e"]
    )
