"""The weight-sync benchmark, run as its user runs it, on a small model."""

import json
import subprocess
import sys
from math import prod

import pytest

from skipper.benchmarks.report import Report
from skipper.benchmarks.weight_sync.command import main
from skipper.benchmarks.weight_sync.model import Model, fsdp, tensor_parallel
from skipper.benchmarks.weight_sync.planning import measure_planning
from skipper.torchstore.algebra.layout import uncovered

NAMES = [
    "sync_direct",
    "wire_amplification",
    "control_rpcs_per_sync",
    "sync_snapshot",
    "readers_3_vs_1",
    "newer_than_wake_p99_ms",
    "put_64B_p50_us",
    "get_64B_p50_us",
    "plan_compile_s",
    "plan_replay_us_per_op",
]


def test_a_quick_run_measures_everything_and_finds_every_byte_right() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "skipper.benchmarks.weight_sync", "--quick", "--json", "-"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    report = Report.from_dict(json.loads(run.stdout))
    rows = {row.name: row for row in report.results}
    assert list(rows) == NAMES
    assert report.errors == ()
    assert rows["wire_amplification"].value == 1.0
    assert rows["control_rpcs_per_sync"].max <= 2
    nbytes = 2 * Model(layers=2, vocabulary=4096).numel()
    for name in ("sync_direct", "sync_snapshot"):
        reference = rows[name].reference
        assert reference is not None
        assert reference.name == "memcpy"
        # Norms are whole on both generators, everything else lies on one of them.
        assert nbytes < int(str(rows[name].parameters["nbytes"])) < 1.01 * nbytes
    assert "sync_direct" in run.stderr  # the table, beside the JSON


def test_the_model_is_the_one_that_it_says() -> None:
    shapes = Model().shapes()
    assert (len(shapes), Model().numel()) == (290, 494_032_768)
    assert sum(map(prod, shapes.values())) == Model().numel()


@pytest.mark.parametrize("cut", [fsdp, tensor_parallel])
def test_the_ranks_of_a_side_hold_the_whole_model(cut: object) -> None:
    assert callable(cut)
    for layout in cut(Model(layers=1, vocabulary=100).shapes(), 3).values():
        boxes = {piece.box for rank in range(3) for piece in layout.pieces((rank,))}
        assert uncovered(layout.global_shape, frozenset(boxes)) == ()


def test_a_plan_of_a_large_job_is_made_and_replayed() -> None:
    planned = measure_planning(tensors=50, sources=8, readers=6, iterations=2)
    assert (planned.tensors, len(planned.compile_s), len(planned.replay_us)) == (50, 2, 20)
    assert planned.segments > planned.tensors


@pytest.mark.parametrize(
    ("arguments", "complaint"), [(("--json", "no/such/folder/report.json"), "no folder"), (("--quik",), "--quik")]
)
def test_what_cannot_be_done_is_refused_before_the_run(
    arguments: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert complaint in capsys.readouterr().err
