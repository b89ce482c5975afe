import json
import os
import signal
import subprocess

import pytest

from skipper.benchmarks.actors.command import main, rows
from skipper.benchmarks.actors.rounds import PIPELINED, ActorsPlan

from .programs import LIMIT_S, ROOT, SKIPPER, Terminal
from .quick import quick_run

NAMES = {
    "grpc_aio_unary_p50_us",
    "grpc_aio_bidi_msgs_per_s",
    "memcpy_64MiB_gb_per_s",
    "call_one_p50_us",
    "service_route_p50_us",
    "rpc_client_call_p50_us",
    "rpc_client_future_p50_us",
    "actor_to_actor_p50_us",
    "actor_to_actor_async_p50_us",
    "call_fanout4_p50_us",
    "pipelined_calls_per_s",
    "broadcast_msgs_per_s",
    "call_64MiB_gb_per_s",
    "spawn_4_procs_s",
}
KINDS = (
    "grpc_unary",
    "grpc_stream",
    "memcpy",
    "call_one",
    "service_route",
    "rpc_call",
    "rpc_future",
    "actor_to_actor",
    "async_actor_to_actor",
    "fanout",
)
KINDS += ("pipelined", "broadcast", "bulk", "spawn")


def test_a_quick_run_prints_every_figure_beside_its_reference() -> None:
    report, told = quick_run("skipper.benchmarks.actors")
    assert {row.name for row in report.results} == NAMES
    assert all(row.value > 0 for row in report.results)
    assert report.errors == ()
    assert "call_one_p50_us" in told  # the table


def test_ctrl_c_leaves_the_rows_of_the_rounds_that_are_whole(terminal: Terminal) -> None:
    with subprocess.Popen(
        [*SKIPPER, "actors", "--json"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=terminal.theirs,
        text=True,
        env={**{name: value for name, value in os.environ.items() if name != "CI"}, "TERM": "xterm"},
        start_new_session=True,
    ) as process:
        terminal.wait_for("1 of 24 rounds")
        os.killpg(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    report = json.loads(out)
    assert ({row["name"] for row in report["results"]}, report["errors"]) == (NAMES, ["interrupted"])
    assert "Traceback" not in terminal.rest()


def test_before_the_first_round_is_whole_there_are_no_rows() -> None:
    assert rows({"spawn": [1]}, ActorsPlan()) == []


def test_rates_and_ratios_follow_from_the_durations() -> None:
    times = {kind: [1_000_000, 2_000_000, 4_000_000] for kind in KINDS}
    times["call_one"] = [500_000, 1_000_000, 3_000_000]
    by_name = {row.name: row for row in rows(times, ActorsPlan(broadcasts=10))}
    assert by_name["call_one_p50_us"].value == 1000
    assert by_name["call_one_p50_us"].ratio == 0.5
    assert by_name["service_route_p50_us"].ratio == 2
    assert by_name["rpc_client_call_p50_us"].ratio == 1
    assert by_name["pipelined_calls_per_s"].value == PIPELINED / 0.002
    assert by_name["broadcast_msgs_per_s"].value == 4 * 10 / 0.002
    assert by_name["call_64MiB_gb_per_s"].value == pytest.approx((64 << 20) / 2e6)
    assert by_name["call_64MiB_gb_per_s"].ratio == 1
    assert by_name["spawn_4_procs_s"].value == 0.002


def test_the_rows_are_of_the_shapes_that_were_asked_for() -> None:
    report, _ = quick_run("skipper.benchmarks.actors", "-n", "2", "-s", "2K", "--bulk", "1M")
    names = {row.name for row in report.results}
    assert {"call_fanout2_p50_us", "spawn_2_procs_s", "call_1MiB_gb_per_s", "memcpy_1MiB_gb_per_s"} <= names
    assert (report.config["procs"], report.config["message_nbytes"], report.config["bulk_nbytes"]) == (2, 2048, 1 << 20)


def test_a_wrong_command_line_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--fast"]) == 2
    assert main(["--size", "2M"]) == 2
    assert main(["--procs", "1"]) == 2
    assert main(["--json", "/nowhere/at/all.json"]) == 2
    assert "skipper actors:" in capsys.readouterr().err
