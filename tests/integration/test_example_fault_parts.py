"""Parts of the fault-tolerant training example: its arithmetic, its bookkeeping, its command line."""

from __future__ import annotations

import pytest
import torch

from examples.fault_tolerance.chaos import Fault
from examples.fault_tolerance.coordinator import Step
from examples.fault_tolerance.loop import Learned
from examples.fault_tolerance.outcome import Comparison, Outcome
from examples.fault_tolerance.record import Held, Record
from examples.fault_tolerance.replica import Replica
from examples.fault_tolerance.task import Task
from examples.fault_tolerant_ddp import parse

TASK = Task(batch=10, inputs=3, hidden=4)


def recorded(*faults: Fault) -> Record:
    """Ten steps, one in each second, of two groups; the second one has a new life from step 5 on."""
    record = Record(groups=2, faults=list(faults))
    for number in range(1, 11):
        entered = ((0, 0), (1, 0)) if number == 1 else ((1, 1),) if number == 5 else ()
        record.note(Step(number, 1.0 / number, 2, entered, 0, float(number)))
    record.held.append(Held(0, 0))
    return record


def outcome_of(record: Record, comparison: Comparison | None = None) -> Outcome:
    return Outcome(record, Learned(10, [torch.ones(3), torch.ones(3)]), comparison)


def test_a_batch_is_the_same_whoever_asks_and_other_steps_have_others() -> None:
    assert torch.equal(TASK.inputs_of(7), Task(batch=10, inputs=3, hidden=4).inputs_of(7))
    assert not torch.equal(TASK.inputs_of(7), TASK.inputs_of(8))


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 10])
def test_shares_cover_the_batch_once(parts: int) -> None:
    shares = TASK.shares(parts)
    assert [sample for begin, end in shares for sample in range(begin, end)] == list(range(10))


def test_gradients_of_shares_add_up_to_that_of_the_batch() -> None:
    whole, part = Replica(TASK), Replica(TASK)
    whole.differentiate(3, 0, 10)
    total = torch.zeros_like(part.gradient)
    for begin, end in TASK.shares(3):
        part.differentiate(3, begin, end)
        total += part.gradient
    torch.testing.assert_close(total, whole.gradient, rtol=1e-12, atol=1e-12)


def test_who_takes_over_a_state_goes_on_with_the_same_bits() -> None:
    donor, heir = Replica(TASK), Replica(TASK)
    for step in range(1, 4):
        donor.differentiate(step, 0, 10)
        donor.apply(donor.gradient.clone())
    donor.state_handle.read_into(heir.state).get()
    heir.resume(3)
    for replica in (donor, heir):
        replica.differentiate(4, 0, 10)
        replica.apply(replica.gradient.clone())
    assert torch.equal(donor.state, heir.state)


def test_recovery_lasts_until_the_group_is_in_a_step_and_a_standstill_until_anybody_is() -> None:
    record = recorded(Fault("kill", 1, 0, 2.5, False))
    (cost,) = record.recoveries()
    assert (cost.recovered_s, cost.standstill_s) == (2.5, 0.5)
    assert not record.pending(11.0)


def test_a_death_that_nobody_has_recovered_from_is_pending_and_an_error() -> None:
    record = recorded(Fault("stop", 0, 0, 2.5, False))
    assert not record.pending(2.0)
    assert len(record.pending(3.0)) == 1
    assert outcome_of(record).errors(None) == ["of 1 deaths 0 were recovered from"]


def test_a_mean_recovery_above_the_bound_is_an_error() -> None:
    outcome = outcome_of(recorded(Fault("kill", 1, 0, 2.5, False)))
    assert outcome.errors(2.6) == []
    assert outcome.errors(2.4) == ["recovery took 2.50 s in the mean, more than 2.4 s"]


def test_a_loss_or_a_weight_that_is_not_that_of_the_undisturbed_run_is_an_error() -> None:
    record, learned = recorded(), Learned(10, [torch.ones(3, dtype=torch.float64)])
    losses = [1.0 / number for number in range(1, 11)]
    same = Comparison.of(record, learned, losses, torch.ones(3, dtype=torch.float64))
    assert outcome_of(record, same).errors(None) == []
    for wrong in (
        Comparison.of(record, learned, [*losses[:4], losses[4] * 1.0001, *losses[5:]], learned.states[0]),
        Comparison.of(record, learned, losses, learned.states[0] + 1e-4),
    ):
        (error,) = outcome_of(record, wrong).errors(None)
        assert "not what the undisturbed run has learned" in error


def test_processes_with_different_weights_are_an_error() -> None:
    outcome = Outcome(recorded(), Learned(10, [torch.ones(3), torch.ones(3) + 1e-7]), None)
    assert outcome.errors(None) == ["the processes do not have the same weights"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--steps", "0"),
        ("--groups", "3", "--at-once", "4"),
        ("--kinds", "kill,boredom"),
        ("--kinds", "host"),
        ("--kinds", "host", "--groups", "3", "--job", "local:2"),
        ("--every", "0"),
        ("--deadline", "-1"),
        ("--seed", "-1"),
        ("--groups", "50", "--procs", "2"),
        ("--json", "no/such/folder/report.json"),
    ],
)
def test_a_senseless_command_line_is_refused(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse(arguments)
    assert exit_.value.code == 2
    assert "error:" in capsys.readouterr().err
