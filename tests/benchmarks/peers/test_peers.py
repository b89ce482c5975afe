import os
import subprocess
import sys
from pathlib import Path

import pytest

from skipper.benchmarks.peers.command import main
from skipper.benchmarks.peers.page import page
from skipper.benchmarks.peers.pictures import draw
from skipper.benchmarks.peers.results import figures, results, standings
from skipper.benchmarks.peers.roster import OURS, ROSTER
from skipper.benchmarks.peers.runner import Outcome
from skipper.benchmarks.peers.work import BATCHES, FAMILIES, REGION_NBYTES, ROWS, one_sided
from skipper.benchmarks.report import Report

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 100
PEERS = {peer.name: peer for peer in ROSTER}
ROWS_BY_NAME = {row.name: row for row in ROWS}
UNKNOWN = ("time", "cpu", "kernel", "python", "torch", "commit")
CALL, READ = ROWS_BY_NAME["call"], ROWS_BY_NAME["read_1MiB"]


def test_a_quick_run_writes_a_page_and_a_report_of_ours_beside_the_floors(tmp_path: Path) -> None:
    names = "call,actor_to_actor,read_64B,write_64B,read_64x1MiB"
    chosen = ["--peers", "skipper,grpc,memcpy", "--rows", names, "--output", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "skipper.benchmarks.peers", "--quick", "--no-plots", *chosen],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert "round 1, memory: memcpy, 3 rows" in done.stderr
    (text,) = tmp_path.glob("*.md")
    (document,) = tmp_path.glob("*.json")
    report = Report.from_json(document.read_text())
    by_peer = {name: {row.name for row in report.results if row.parameters["peer"] == name} for name in PEERS}
    assert by_peer["skipper"] == set(names.split(","))
    assert by_peer["grpc"] == set(names.split(","))
    assert by_peer["memcpy"] == {"read_64B", "write_64B", "read_64x1MiB"}
    assert all(row.value > 0 for row in report.results)
    assert not report.errors
    assert report.config["not_measured"] == []
    assert "| Skipper |" in text.read_text()
    assert str(tmp_path) not in document.read_text()


def test_a_wrong_command_line_starts_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for argv in (["--fast"], ["--peers", "nobody"], ["--rows", "call,nothing"], ["--rounds", "0"]):
        assert main([*argv, "--output", str(tmp_path)]) == 2
    assert main(["--torchstore", str(tmp_path), "--output", str(tmp_path)]) == 2
    assert "no checkout of torchstore" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_every_peer_says_for_every_family_how_it_does_it_or_why_not() -> None:
    for peer in ROSTER:
        for family in FAMILIES:
            assert peer.floor or (family in peer.ways) != (family in peer.lacks)
    assert {row.yardstick for row in ROWS} <= {peer.name for peer in ROSTER if peer.floor}


def test_transfers_stay_within_the_region_and_do_not_overlap() -> None:
    for row in ROWS:
        if row.family == "memory":
            write, spans = one_sided(row.name)
            assert write == row.name.startswith("write")
            assert sum(nbytes for _, nbytes in spans) == row.amount
            ends = [offset + nbytes for offset, nbytes in spans]
            assert [offset for offset, _ in spans] == [0, *ends[:-1]]
            assert ends[-1] <= REGION_NBYTES
    assert len(BATCHES["read_320"]) == 320


def outcome() -> Outcome:
    """Three rounds: ours twice as fast as gRPC in the first and four times in the second; Ray slower than both."""
    made = Outcome(rounds=3)
    made.samples["call", "grpc"] = {0: [400_000] * 3, 1: [800_000]}
    made.samples["call", OURS] = {0: [100_000, 200_000, 900_000], 1: [200_000]}
    made.samples["call", "ray_core"] = {1: [1_000_000]}
    made.samples["read_1MiB", "memcpy"] = {0: [50_000], 1: [50_000]}
    made.samples["read_1MiB", OURS] = {0: [100_000], 1: [100_000], 2: [100_000]}  # the others failed in the last
    made.samples["read_1MiB", "nixl"] = {0: [80_000], 1: [50_000]}
    made.reasons["call", "nixl"] = "it moves memory; it has no actors"
    return made


def test_ratios_are_those_of_the_same_round() -> None:
    found = figures(outcome(), [CALL, READ], ROSTER)
    ours = found["call", OURS]
    assert ours.by_round == {0: 200.0, 1: 200.0}
    assert ours.n == 4
    assert ours.ratio is not None
    assert (ours.ratio.min, ours.ratio.max, ours.ratio.n) == (0.25, 0.5, 2)
    assert found["read_1MiB", OURS].value == pytest.approx(READ.amount / 100_000)
    ray = next(row for row in results(found) if row.parameters["peer"] == "ray_core")
    assert (ray.value, ray.parameters["ratio_n"], ray.parameters["ratio_p50"]) == (1000.0, 1, 1.25)
    assert Report.from_json(Report([], {}, results(found)).to_json()).results


def test_standing_says_by_how_much_ours_is_ahead_or_behind() -> None:
    call, read = standings(figures(outcome(), [CALL, READ], ROSTER), [CALL, READ], OURS)
    assert call.first
    assert call.other is not None
    assert call.times is not None
    assert (call.other.peer.name, call.times.p50) == ("ray_core", 5.0)  # gRPC is a floor, not a competitor
    assert not read.first
    assert read.times is not None
    assert (read.times.min, read.times.max) == (0.5, 0.8)


def test_the_page_names_every_figure_and_every_reason() -> None:
    made = outcome()
    found = figures(made, [CALL, READ], ROSTER)
    text = page(
        found,
        standings(found, [CALL, READ], OURS),
        made.reasons,
        rows=[CALL, READ],
        peers=ROSTER,
        versions={"nixl": "nixl-cu12 1.5.1"},
        rounds=2,
        environment={**dict.fromkeys(UNKNOWN), "cores_usable": 2, "memory_nbytes": 1 << 34},
        pictures=["a.png"],
    )
    assert "200 µs<br>0.25 (0.25 to 0.5, n 2)" in text
    assert "| NIXL | `call` | it moves memory; it has no actors |" in text
    assert "**behind:** 0.5 (0.5 to 0.8, n 2)" in text
    assert "![a.png](a.png)" in text
    assert "nixl-cu12 1.5.1" in text


def test_pictures_are_drawn_of_what_there_is(tmp_path: Path) -> None:
    found = figures(outcome(), [CALL, READ], ROSTER)
    names = draw(found, [CALL, READ], ROSTER, tmp_path / "run")
    assert names == ["run_read.png", "run_actors.png"]
    assert sorted(os.listdir(tmp_path)) == sorted(names)
