"""Some schedules; `python -m tests.simulation` plays more of them, for as long as one likes."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

COUNT = 100
TIMEOUT_S = 400
"""On a machine that does a lot besides; alone it takes some seconds."""

pytestmark = pytest.mark.timeout(TIMEOUT_S + 20)


def run(*arguments: str, hash_seed: str = "random") -> tuple[int, dict[str, Any], str]:
    """The command, in a process of its own, which has the clock to itself: status, summary, complaints."""
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    env = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_no_schedule_breaks_an_invariant() -> None:
    status, summary, complaints = run("--count", str(COUNT))
    assert (status, complaints) == (0, "")
    assert summary["schedules"] == COUNT
    assert summary["errors"] > COUNT  # which were in order: somebody had died
    assert {"kill", "break", "stall", "freeze", "vanish", "partition"} <= summary["faults"].keys()


def test_whoever_ends_more_processes_than_it_remembers_is_told_of_each_once() -> None:
    """In a job of some hundred hosts, what is known of the first that end is forgotten before the last has ended."""
    status, summary, complaints = run("--count", "40", "--hosts", "6", "--remembered", "8")
    assert (status, complaints) == (0, "")
    assert summary["processes"] > 40 * 12


def test_a_seed_plays_the_same_schedule_again() -> None:
    first, again = (run("--seed", "42", hash_seed=seed)[1] for seed in ("1", "2"))
    assert first == again
    assert run("--seed", "43")[1]["digest"] != first["digest"]


def test_every_planted_fault_is_found() -> None:
    """So each invariant can be broken, and the simulation sees it."""
    status, found, _ = run("--planted")
    assert None not in found.values(), found
    assert status == 0
