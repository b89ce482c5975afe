"""Every fault of `storm` once; ``python -m tests.control.storm`` goes on for longer, and under load."""

from . import storm


def test_every_fault_is_told_within_its_bound_and_nothing_is_left_of_what_it_hits() -> None:
    outcome = storm.run(len(storm.FAULTS), seed=3)
    assert outcome.violations == []
    assert outcome.faults == dict.fromkeys(storm.FAULTS, 1)
    assert outcome.answered > 0
