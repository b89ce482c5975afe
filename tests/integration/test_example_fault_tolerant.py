"""Training while processes die: of all kinds, several at once, during recovery, all of them, and the script itself."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.fault_tolerance.group import ENVIRONMENT
from examples.fault_tolerance.saboteur import DEATHS, HOST, Saboteur
from examples.fault_tolerance.task import Task
from examples.fault_tolerance.worker import Worker
from skipper import control
from tests.integration.example_process import files_in_shm, run, running, wait_until

EXAMPLE = ("-m", "examples.fault_tolerant_ddp")
START_S = 60.0
ENDS_WITHIN_S = 10.0

TOLERANCE = 1e-9


def report_of(path: Path) -> tuple[dict[str, Any], dict[tuple[str, str | None], dict[str, Any]]]:
    """A report, and its rows by name and kind of death."""
    report = json.loads(path.read_text())
    return report, {(row["name"], row.get("kind")): row for row in report["results"]}


def test_a_dozen_deaths_of_all_kinds_do_not_change_what_is_learned(tmp_path: Path) -> None:
    where, before = tmp_path / "report.json", files_in_shm()
    # Two in the same moment, of three groups of two: often one whole group is left.
    deaths = ("--deaths", "14", "--at-once", "2", "--every", "0.5")
    example = run(*EXAMPLE, "--procs", "2", "--steps", "50", *deaths, "--json", str(where))
    assert example.process.returncode == 0, example.stdout + example.stderr
    report, rows = report_of(where)
    assert report["errors"] == []
    assert report["deaths"] == report["recovered"] == 14
    assert rows["loss_error", None]["value"] < TOLERANCE
    assert rows["state_error", None]["value"] < TOLERANCE
    assert rows["loss_last", None]["value"] < rows["loss_first", None]["value"] / 5
    assert all(rows["recovery_s", kind]["n"] == rows["standstill_s", kind]["n"] == 2 for kind in DEATHS if kind != HOST)
    assert rows["recovery_s", "all"]["n"] == 14
    assert "weights and moments" in example.stdout
    assert files_in_shm() <= before


def test_without_deaths_every_step_is_made_by_all_and_at_the_first_attempt(tmp_path: Path) -> None:
    where = tmp_path / "report.json"
    # A deadline that also a busy machine keeps.
    example = run(*EXAMPLE, "--deaths", "0", "--steps", "30", "--pace", "0", "--deadline", "30", "--json", str(where))
    assert example.process.returncode == 0, example.stderr
    report, rows = report_of(where)
    assert report["steps"] == 30
    assert report["voided_attempts"] == report["replaced_without_death"] == 0
    assert report["smallest_quorum"] == 3
    assert rows["loss_error", None]["value"] < TOLERANCE


def test_when_all_groups_die_training_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    where = tmp_path / "report.json"
    deaths = ("--groups", "2", "--at-once", "2", "--deaths", "4", "--every", "0.5", "--kinds", "kill,segv")
    checkpoint = ("--checkpoint-every", "10", "--max-mean-recovery", "0.001")
    example = run(*EXAMPLE, *deaths, "--steps", "60", *checkpoint, "--json", str(where))
    assert example.process.returncode == 1, example.stdout + example.stderr
    report, rows = report_of(where)
    (error,) = report["errors"]  # the only one, and nobody can be as quick as this
    assert "more than 0.001 s" in error
    assert error in " ".join(example.stdout.split())
    assert report["deaths"] == report["recovered"] == 4
    assert rows["loss_error", None]["value"] < TOLERANCE
    assert rows["state_error", None]["value"] < TOLERANCE


def test_a_lost_host_is_asked_of_the_engine_anew_and_a_lost_process_is_restarted_where_it_was(tmp_path: Path) -> None:
    where = tmp_path / "report.json"
    deaths = ("--deaths", "2", "--kinds", "host,kill", "--every", "1")
    here = ("--job", "local:2", "--groups", "2", "--no-compare")
    example = run(*EXAMPLE, *here, *deaths, "--steps", "30", "--json", str(where))
    assert example.process.returncode == 0, example.stdout + example.stderr
    report, rows = report_of(where)
    assert report["errors"] == []
    assert rows["recovery_s", "host"]["n"] == rows["recovery_s", "kill"]["n"] == 1
    assert example.stderr.count(": replacement of a host, ") == 1


def test_when_all_groups_die_and_there_is_no_checkpoint_the_run_fails_and_says_so() -> None:
    deaths = ("--groups", "2", "--at-once", "2", "--deaths", "2", "--every", "0.5", "--kinds", "kill")
    example = run(*EXAMPLE, *deaths, "--steps", "1000000")
    assert example.process.returncode == 1
    assert "all 2 groups have died after step" in example.stdout
    assert "--checkpoint-every" in example.stdout
    assert "Traceback" not in example.stdout + example.stderr


def test_a_newcomer_whose_donor_is_dead_says_so_and_takes_over_from_another(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[control.MeshFailure] = []
    monkeypatch.setattr(control, "unhandled_fault_hook", told.append)
    try:
        procs = control.this_host().spawn_procs({"ranks": 3}, env=ENVIRONMENT)
        workers = procs.spawn("workers", Worker, Task(), 5.0)
        donor, other, newcomer = (workers.slice(ranks=rank) for rank in range(3))
        states = [handles.state for handles in workers.handles.call().get(START_S)]
        assert donor.replay.call_one(3).get(START_S) == other.replay.call_one(3).get(START_S)
        with pytest.raises(control.SupervisionError):
            procs.slice(ranks=0).spawn("saboteur", Saboteur).fall.call_one("kill").get(START_S)
        with pytest.raises(control.ActorError, match="OwnerDiedError"):
            newcomer.adopt.call_one(3, [states[0]]).get(START_S)
        newcomer.adopt.call_one(3, [states[1]]).get(START_S)
        step, state = newcomer.learned.call_one().get(START_S)
        assert step == 3
        assert torch.equal(state, other.learned.call_one().get(START_S)[1])
        assert newcomer.replay.call_one(2).get(START_S) == other.replay.call_one(2).get(START_S)
    finally:
        control.shutdown()


def test_a_killed_script_leaves_nobody_not_even_the_frozen() -> None:
    with running(*EXAMPLE, "--kinds", "stop,hang", "--deaths", "1000", "--every", "0.1") as example:
        wait_until(
            lambda: "did not" in example.stderr or example.process.poll() is not None,
            START_S,
            lambda: f"no process was taken for frozen:\n{example.stdout}\n{example.stderr}",
        )
        os.kill(example.process.pid, signal.SIGKILL)
        assert example.wait(ENDS_WITHIN_S) == -signal.SIGKILL
        example.assert_nobody_left()
