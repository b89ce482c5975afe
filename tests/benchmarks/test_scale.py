import contextlib
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from skipper.benchmarks.report import Report, Result
from skipper.benchmarks.scale.command import main
from skipper.benchmarks.scale.host_page import page as page_of
from skipper.benchmarks.scale.host_rows import grown_rows
from skipper.benchmarks.scale.model import (
    ANSWERS_NBYTES,
    CALL_NBYTES,
    CAST_NBYTES,
    ENTRY_NBYTES,
    REPLY_NBYTES,
    SEGMENT_NBYTES,
    Costs,
    latency_us,
    traffic,
)
from skipper.control.runtime.cast.messages import GivenAnswer, pack_answers
from skipper.control.runtime.cast.relay import cast_for
from skipper.control.runtime.cast.tree import RankSpan
from skipper.control.wire.frames import encode
from skipper.control.wire.messages import Call, Kind, Reply
from tests.control.conftest import wait_until

from .quick import ROOT, quick_run

COSTS = Costs(call_us=10, message_us=4, rank_us=1, handle_us=20, wire_us=100)


def test_a_quick_run_measures_both_ways_and_models_more_ranks() -> None:
    report, told = quick_run("skipper.benchmarks.scale", "--fanout", "2", "--ranks", "1024")
    assert report.config["limit"] == "as many as asked for"
    measured = [row for row in report.results if row.name == "call_us"]
    assert {(row.parameters["ranks"], row.parameters["way"]) for row in measured} == {
        (ranks, way) for ranks in (4, 6) for way in ("straight", "tree")
    }
    assert all(row.reference is not None and "model_error" in row.parameters for row in measured)
    beyond = [row for row in report.results if row.name == "modelled_call_us"]
    assert {row.parameters["ranks"] for row in beyond} == {8, 16, 32, 64, 128, 256, 512, 1024}
    assert "processes (as many as asked for)" in told


def test_one_rank_takes_one_of_everything() -> None:
    assert latency_us(1, None, COSTS, cores=None) == 10 + 2 + 100 + 20 + 100 + 2 + 1
    assert latency_us(1, 8, COSTS, cores=1) == latency_us(1, None, COSTS, cores=None)


def test_on_one_core_all_work_is_done_one_after_the_other() -> None:
    costs = Costs(call_us=0, message_us=4, rank_us=1, handle_us=20, wire_us=0)
    assert latency_us(50, None, costs, cores=1) == 50 * (4 + 20 + 1)
    assert latency_us(50, 3, costs, cores=1) == 50 * (4 + 20 + 1)  # a tree saves no work, it spreads it


def test_a_tree_takes_about_as_long_as_it_is_deep() -> None:
    straight, tree = (latency_us(32_768, fanout, COSTS, cores=None) for fanout in (None, 8))
    assert straight > 32_768 * 4
    assert tree < 5 * (2 * 100 + 8 * 4) + 20 + 10 + 32_768 * 1 + 100
    assert latency_us(32_768, 8, Costs(10, 4, 0, 20, 100), cores=None) < straight / 50


def test_messages_are_counted_as_they_are_sent() -> None:
    message = traffic(64, 8, argument_nbytes=100, result_nbytes=50, text_nbytes=10)
    assert (message.depth, message.messages, message.caster_messages, message.most_messages) == (2, 128, 16, 16)
    straight = traffic(64, None, argument_nbytes=100, result_nbytes=50, text_nbytes=10)
    assert (straight.caster_messages, straight.most_messages) == (128, 2)


def test_the_sizes_of_the_model_are_those_on_the_wire() -> None:
    tag = 1
    arguments, result = bytes(100), bytes(50)
    call = Call(1, 2, method="echo", payload=(arguments,))
    assert sum(map(len, encode([call]))) == tag + CALL_NBYTES + 4 + 100
    assert sum(map(len, encode([Reply(2, payload=(result,))]))) == tag + REPLY_NBYTES + 50
    assert sum(map(len, encode([cast_for(RankSpan(0, 4), 1, 2, 3, (), call)]))) == tag + CAST_NBYTES + 4 + 100
    answers = pack_answers(1, 7, 2, [GivenAnswer(n, Kind.REPLY, (result,)) for n in range(3)], is_home=True)
    assert sum(map(len, encode([answers]))) == tag + ANSWERS_NBYTES + 3 * (ENTRY_NBYTES + SEGMENT_NBYTES + 50)


def test_a_wrong_command_line_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--procs", "3"]) == 2
    assert main(["--json", "/nowhere/at/all.json"]) == 2
    assert "skipper scale:" in capsys.readouterr().err


def test_a_caster_with_a_core_of_its_own_works_while_ranks_do() -> None:
    costs = Costs(call_us=0, message_us=4, rank_us=10, handle_us=20, wire_us=0)
    together = latency_us(50, None, costs, cores=1)
    apart = latency_us(50, None, costs, cores=1, caster_apart=True)
    assert together == 50 * (4 + 20 + 10)
    assert 50 * 20 < apart < 50 * 20 + 4 + 20 + 10 + 4


def test_a_quick_run_with_hosts_measures_hollow_and_real_ones_and_writes_a_page(tmp_path: Path) -> None:
    page = tmp_path / "scale.md"
    report, told = quick_run(
        "skipper.benchmarks.scale", "--hollow", "2,4", "--real", "4", "--net", "local", "--page", str(page)
    )
    labels = {(row.parameters["label"], row.parameters["hosts"]) for row in report.results if row.name == "attach_s"}
    modelled_at = {("modelled", hosts) for hosts in (4, 4096, 10_000)}
    assert labels == {("hollow", 2), ("hollow", 4), ("measured", 4), *modelled_at}
    names = {row.name for row in report.results if row.parameters["label"] == "hollow"}
    assert {"cast_us", "first_reply_s", "idle_root_messages_per_s", "death_known_ms", "recovery_s"} <= names
    assert {"process_death_known_ms", "all_deaths_known_s", "host_cast_cpu_us", "root_descriptors_per_host"} <= names
    assert {"cast_reference_us", "reference_nbytes_per_host"} <= names
    checked = [row for row in report.results if "error" in row.parameters]
    assert [row.parameters["hosts"] for row in checked if row.name == "cast_us"] == [2, 4]
    assert {row.name for row in checked} > {"attach_s", "root_memory_nbytes_per_host"}
    modelled = {row.parameters["hosts"] for row in report.results if row.parameters["label"] == "modelled"}
    assert modelled == {2, 4, 4096, 10_000}
    text = page.read_text()
    assert "| cast and all answers, p50, ms | hollow |" in text
    assert "| cast and all answers, p50, ms | modelled |" in text
    assert "## What the script does for each host" in text
    assert "## What breaks first" in text
    assert "error" in told


def test_what_grows_is_modelled_from_the_next_smaller_number_of_hosts_and_compared() -> None:
    def row(name: str, hosts: int, value: float) -> Result:
        return Result.single(name, "s", value, parameters={"hosts": hosts, "label": "hollow"})

    rows = [row("attach_s", 1024, 2.0), row("attach_s", 2048, 5.0), row("root_descriptors_per_host", 2048, 4.0)]
    grown = {(each.name, each.parameters["hosts"]): each for each in grown_rows(rows)}
    assert {key: each.value for key, each in grown.items()} == {
        ("attach_s", 2048): 4.0,
        ("attach_s", 4096): 10.0,
        ("attach_s", 10_000): pytest.approx(5.0 * 10_000 / 2048),
        ("root_descriptors_per_host", 4096): 4.0,
        ("root_descriptors_per_host", 10_000): 4.0,
    }
    assert grown["attach_s", 2048].parameters["error"] == pytest.approx(-0.2)
    assert "error" not in grown["attach_s", 4096].parameters


def test_a_killed_run_leaves_no_hosts() -> None:
    command = [sys.executable, "-m", "skipper.benchmarks.scale", "--quick", "--hollow", "2", "--real", "2"]
    with subprocess.Popen([*command, "--net", "local"], cwd=ROOT, stdout=subprocess.DEVNULL) as run:
        process = psutil.Process(run.pid)
        wait_until(lambda: "serve" in words_below(process), "an agent runs", timeout=60.0)
        started = process.children(recursive=True)
        run.kill()
    assert psutil.wait_procs(started, timeout=60.0)[1] == []


def words_below(process: psutil.Process) -> set[str]:
    """The words of the commands that it has started, and of theirs."""
    words: set[str] = set()
    for each in process.children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            words.update(each.cmdline())
    return words


def test_options_of_hosts_are_refused_without_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--page", "scale.md"]) == 2
    assert main(["--real", "2"]) == 2
    assert main(["--hollow", "0"]) == 2
    assert main(["--hollow", "1,x"]) == 2
    assert "is about --hollow" in capsys.readouterr().err


def test_the_page_of_the_documentation_is_the_one_of_the_newest_run() -> None:
    newest = max((ROOT / "benchmarks" / "results" / "scale").glob("*.json"))
    assert (ROOT / "docs" / "scale.md").read_text() == page_of(Report.from_json(newest.read_text()))
