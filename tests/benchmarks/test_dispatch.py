import pytest

from skipper.benchmarks.dispatch.command import main, rows
from skipper.benchmarks.dispatch.rounds import DispatchPlan

from .quick import quick_run

NAMES = {
    "grpc_aio_unary_p50_us",
    "call_one_p50_us",
    "eager_torch_op_us",
    "memcpy_64MiB_gb_per_s",
    "eager_op_issue_us",
    "replay_op_us",
    "worker_replay_overhead_us",
    "worker_op_overhead_us",
    "fetch_small_p50_us",
    "fetch_64MiB_gb_per_s",
    "issue_to_few_us",
    "issue_to_many_us",
    "issue_cost_vs_world",
    "ddp_step_us",
    "step_us",
    "compiled_step_us",
}
KINDS: tuple[str, ...] = ("grpc_unary", "issue", "replay", "worker_op", "worker_replay_op", "eager_op", "call_one")
KINDS += ("fetch_small", "fetch_bulk", "memcpy", "issue_to_few", "issue_to_many", "ddp_step", "step")
KINDS += ("compiled_step",)


def test_a_quick_run_prints_every_figure_beside_its_reference() -> None:
    report, told = quick_run("skipper.benchmarks.dispatch")
    assert {row.name for row in report.results} == NAMES
    assert report.errors == ()
    assert "eager_op_issue_us" in told  # the table


def test_figures_follow_from_the_durations() -> None:
    times = {kind: [1000.0, 2000.0, 4000.0] for kind in KINDS}
    times["worker_op"] = [4000.0, 5000.0, 6000.0]
    times["issue_to_many"] = [1500.0, 2500.0, 5000.0]
    by_name = {row.name: row for row in rows(times, DispatchPlan())}
    assert by_name["eager_op_issue_us"].value == 2
    assert by_name["eager_op_issue_us"].ratio == 1
    assert by_name["worker_op_overhead_us"].value == 3
    assert by_name["replay_op_us"].ratio == 1
    assert by_name["worker_replay_overhead_us"].value == 0
    assert by_name["issue_cost_vs_world"].value == 1.25
    assert by_name["step_us"].ratio == by_name["compiled_step_us"].ratio == 1
    assert by_name["fetch_64MiB_gb_per_s"].value == pytest.approx((64 << 20) / 2000)


def test_a_wrong_command_line_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--nonsense"]) == 2
    assert "nonsense" in capsys.readouterr().err
