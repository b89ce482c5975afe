"""The main job as a user runs it: short, verified, below its goal, and with processes killed under it."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console

from examples.rl import large_sync
from examples.rl_weight_sync import sync_large
from tests.integration.example_process import ExampleProcess, files_in_shm, run, running, wait_until

RL = ("-m", "examples.rl_weight_sync")
START_S = 60.0
ENDS_WITHIN_S = 10.0
"""From a kill to the script's own end, on a machine whose two cores all processes share."""


def test_three_verified_steps_print_nothing_but_json_on_stdout(tmp_path: Path) -> None:
    before = files_in_shm()
    picture = tmp_path / "curves.png"
    example = run(*RL, "--steps", "3", "--verify", "--json", "-", "--png", str(picture))
    assert example.process.returncode == 0, example.stderr
    report = json.loads(example.stdout)
    rows = {row["name"]: row for row in report["results"]}
    assert {"reward_first", "reward_last", "sync_s", "sync_gb_per_s"} <= rows.keys()
    assert report["mismatched_tensors"] == 0
    # Two ranks of two replicas compare each of the 41 tensors after the first sync and after each of three steps.
    assert report["compared_tensors"] == 2 * 2 * 41 * 4
    assert report["killed_processes"] == report["replaced_replicas"] == 0
    assert report["errors"] == []
    assert report["config"]["steps"] == 3
    assert 0.0 <= rows["reward_first"]["value"] < 0.3
    assert rows["sync_s"]["n"] == 3
    assert rows["sync_s"]["nbytes"] > 2 * 9_000_000
    assert rows["sync_s"]["reference"]["name"] == "memcpy"
    assert 0 <= rows["staleness"]["min"] <= rows["staleness"]["max"] <= 3
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "ratio to memcpy" in example.stderr
    assert "Warning" not in example.stderr
    assert files_in_shm() <= before


def test_other_mesh_sizes_sync_as_exactly_and_a_reward_below_the_goal_is_a_failure(tmp_path: Path) -> None:
    where = tmp_path / "report.json"
    sizes = ("--trainers", "3", "--generators", "1", "--replicas", "1")
    goal = ("--steps", "1", "--min-reward", "0.99")
    example = run(*RL, *sizes, *goal, "--verify", "--json", str(where), "--png", str(tmp_path / "curves.png"))
    assert example.process.returncode == 1, example.stderr
    report = json.loads(where.read_text())
    assert report["mismatched_tensors"] == 0
    assert report["compared_tensors"] == 41 * 2
    (error,) = report["errors"]
    assert "below 0.99" in error
    assert error in example.stdout
    assert "ratio to memcpy" in example.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("--steps", "0"),
        ("--trainers", "0"),
        ("--generators", "3"),
        ("--replicas", "0"),
        ("--steps", "3", "--kill-at", "4"),
        ("--json", "no/such/folder/report.json"),
        ("--hosts", "hosts", "--certs", "folder"),  # the weights would go over the network as they are
    ],
)
def test_a_senseless_command_line_is_refused_before_anything_starts(arguments: tuple[str, ...]) -> None:
    example = run(*RL, *arguments)
    assert example.process.returncode == 2
    assert "error:" in example.stderr


def long_run(folder: Path) -> tuple[str, ...]:
    return (*RL, "--steps", "10000", "--png", str(folder / "curves.png"))


def members(example: ExampleProcess, role: str) -> list[int]:
    """The processes of a mesh, which bear its name, or of a service, which bear that of their replica."""
    family = example.family().items()
    return sorted(pid for pid, command in family if f" {role}{{" in command or f" {role}-" in command)


def wait_for(example: ExampleProcess, condition: Callable[[], object]) -> None:
    wait_until(condition, START_S, lambda: f"not in {START_S} s:\n{example.stdout}\n{example.stderr}")
    assert example.process.poll() is None, example.stderr


def test_a_generator_killed_in_the_loop_is_replaced_and_the_run_goes_on(tmp_path: Path) -> None:
    where = tmp_path / "report.json"
    arguments = ("--steps", "4", "--kill-at", "2", "--generators", "1", "--verify", "--json", str(where))
    example = run(*RL, *arguments, "--png", str(tmp_path / "curves.png"))
    assert example.process.returncode == 0, example.stdout + example.stderr
    report = json.loads(where.read_text())
    assert report["killed_processes"] == report["replaced_replicas"] == 1
    assert report["mismatched_tensors"] == 0
    assert report["compared_tensors"] >= 41 * (2 + 4)  # both replicas first and one of them always
    assert "generators killed" in example.stdout


def test_a_trainer_killed_in_the_loop_ends_the_run_and_is_named_first(tmp_path: Path) -> None:
    with running(*long_run(tmp_path)) as example:
        wait_for(example, lambda: "step 1/" in example.stdout)
        os.kill(members(example, "trainers")[1], signal.SIGKILL)
        assert example.wait(ENDS_WITHIN_S) == 1
        assert "SupervisionError: actor trainers{'gpus': 1} died" in example.stdout
        assert "SIGKILL" in example.stdout
        assert "Traceback" not in example.stdout + example.stderr
        example.assert_nobody_left()


@pytest.mark.parametrize("victim", ["trainers", "script"])
def test_a_kill_at_any_moment_leaves_nobody_and_no_file(victim: str, tmp_path: Path) -> None:
    chance = random.Random()
    after = chance.uniform(0.0, 8.0)
    before = files_in_shm()
    with running(*long_run(tmp_path)) as example:
        # From the birth of the processes, through their imports and the first sync, into the loop.
        wait_for(example, lambda: members(example, "trainers") and members(example, "generators"))
        with pytest.raises(subprocess.TimeoutExpired):
            example.process.wait(after)
        pid = example.process.pid if victim == "script" else chance.choice(members(example, victim))
        os.kill(pid, signal.SIGKILL)
        code = example.wait(ENDS_WITHIN_S)
        assert code == (-signal.SIGKILL if victim == "script" else 1), f"killed {victim} after {after} s"
        example.assert_nobody_left()
    assert files_in_shm() <= before


def test_a_machine_without_room_for_the_large_model_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_sync, "available_nbytes", lambda: 1 << 30)
    people, errors = Console(record=True, width=200), list[str]()
    assert sync_large(people, errors) is None
    assert errors == []
    told = r"no sync of a model of 1 GB: it takes \S+ GB of memory, and 1.1 GB are free"
    assert re.search(told, people.export_text())


@pytest.mark.timeout(400)
def test_the_run_goes_on_with_a_large_model_and_says_what_its_figures_mean(tmp_path: Path) -> None:
    where = tmp_path / "report.json"
    arguments = ("--steps", "1", "--large-sync", "--json", str(where), "--png", str(tmp_path / "curves.png"))
    example = run(*RL, *arguments, timeout=380.0)
    assert example.process.returncode == 0, example.stdout + example.stderr
    assert "What this means:" in example.stdout
    if "no sync of a model of 1 GB: it takes" in example.stdout:
        pytest.skip("this machine has no room for it")
    assert "The same with a model of 1 GB" in example.stdout
    rows = {row["name"]: row for row in json.loads(where.read_text())["results"]}
    assert rows["large_sync_s"]["nbytes"] > 900_000_000
    assert rows["large_sync_s"]["reference"]["name"] == "memcpy"


def test_a_device_that_is_not_there_is_refused_before_anything_starts() -> None:
    seen = torch.cuda.device_count()
    ranks = str(seen + 1)
    example = run(*RL, "--device", "cuda", "--trainers", ranks, "--generators", "1")
    assert example.process.returncode == 2
    assert f"sees {seen or 'none'} here" in example.stderr
