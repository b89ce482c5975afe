"""Data-parallel training by the tensor engine while replicas are killed in the middle of steps."""

from __future__ import annotations

from tests.integration.example_process import run


def test_replicas_that_are_killed_in_steps_are_replaced_and_what_is_learned_is_the_same() -> None:
    example = run(
        *("-m", "examples.fault_tolerant_engine", "--replicas", "2", "--steps", "8", "--deaths", "2"), timeout=100.0
    )
    assert example.process.returncode == 0, example.stderr
    assert example.stderr == ""
    first, second, _, *rows, last = example.stdout.splitlines()
    assert first == "step 2: killed and replaced: replica 0"
    assert second == "step 6: killed and replaced: replica 1"
    assert len(rows) == 8
    assert last.startswith("largest difference: ")
    losses = [float(row.split()[1]) for row in rows]
    assert losses[-1] < losses[0]  # it learns
