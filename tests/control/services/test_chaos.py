"""A few seconds of `chaos`; ``python -m tests.control.services.chaos`` goes on for longer."""

from collections import Counter
from pathlib import Path

from tests.control.services import chaos


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
