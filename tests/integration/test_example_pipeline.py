"""A pipeline of stages on slices of a mesh."""

from __future__ import annotations

from tests.integration.example_process import run


def test_a_pipeline_of_three_stages_trains_as_one_process_does() -> None:
    example = run("-m", "examples.pipeline_parallel", "--steps", "4", "--microbatches", "5", timeout=100.0)
    assert example.process.returncode == 0, example.stderr
    assert example.stderr == ""
    rows = [line.split() for line in example.stdout.splitlines()[1:5]]
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    assert all(abs(float(pipeline) - float(here)) < 1e-5 for _, pipeline, here in rows)
    assert float(rows[-1][1]) < float(rows[0][1])  # it learns
