"""What `skipper doctor --exposure` says of a job that runs: the whole table, and what is not in it."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skipper.dataplane.doctor.exposure import Reach, expose
from tests.security.target import ROOT, Target

Start = Callable[..., Target]


def doctor(*argv: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "skipper.dataplane.doctor", "--exposure", "--json", "-", *argv]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    return done.returncode, json.loads(done.stdout)


def test_a_default_job_has_no_port_and_nothing_that_others_may_read(target: Start) -> None:
    job = target()
    job.wait_for_rounds(2)
    code, report = doctor("--pid", str(job.pid))
    items = report["items"]
    assert (code, report["open"], report["unseen"]) == (0, 0, []), [item for item in items if not item["designed"]]
    assert {process["pid"] for process in report["processes"]} >= set(job.pids())

    kinds = {item["kind"] for item in items}
    assert kinds == {"abstract", "memfd", "shm", "file", "directory"}, "no TCP, no UDP, no System V, no fifo"
    for item in items:
        told = f"{item['kind']} {item['name']} {item['mode']}"
        if item["kind"] == "abstract":
            assert re.fullmatch(r"@skipper-(logs|[0-9a-f]+)-[0-9a-f]+(/local)?|@[0-9a-f]{5}", item["name"]), told
        elif item["kind"] == "file" and item["name"] == str(job.log):
            assert item["reach"] != "the network", told  # where its user has sent the errors
        elif item["kind"] == "memfd":
            assert re.fullmatch(r"memfd:skipper(-stacks|-answers-1-[0-9]+-[0-9]+|-begins)?", item["name"]), told
            assert item["reach"] == Reach.USER, told
        else:
            assert (item["reach"], item["uid"]) == (Reach.USER, os.geteuid()), told
            assert int(item["mode"], 8) in (0o600, 0o700), told
    names = {item["name"] for item in items}
    folder = job.log.parent / f"skipper-{os.geteuid()}"
    assert {str(folder), str(folder / f"attacked-{job.pid}.json")} <= names
    assert any(item["kind"] == "shm" for item in items), "the buffers in ordinary memory went through UCX"
    assert not [round for round in job.rounds if round["failed"]]

    assert job.pid in {process.pid for process in expose().processes}, "found by what it has open"
    command = [sys.executable, "-m", "skipper.cli.main", "doctor", "--exposure", "--pid", str(job.pid)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
    assert "asks for a proof" in re.sub(r"\s+", " ", done.stdout)
    assert "open: 0" in done.stdout


def test_a_page_that_was_asked_for_is_the_only_port(target: Start) -> None:
    job = target("--page")
    job.wait_for_rounds(1)
    port = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/.*", job.report["addresses"]["page"])
    assert port is not None
    code, report = doctor("--pid", str(job.pid))
    listening = [item for item in report["items"] if item["kind"] in ("tcp", "udp")]
    assert [item["name"] for item in listening] == [f"127.0.0.1:{port[1]}"]
    assert [item["reach"] for item in listening] == [Reach.HOST]
    assert (code, report["open"]) == (1, 1), "it is open, and nobody told the doctor that it was asked for"
    for asked in (f"127.0.0.1:{port[1]}", "127.0.0.1:*"):
        assert doctor("--pid", str(job.pid), "--asked", asked)[0] == 0
    assert doctor("--pid", str(job.pid), "--asked", "10.0.0.7:*")[0] == 1


PROGRAM = Path(__file__).with_name("open_places_script.py")


def test_everything_that_others_could_reach_is_found(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("wide")
    for above in (folder, *folder.parents[: len(folder.parents) - 1]):
        if above != Path("/tmp"):
            above.chmod(0o755)
    with subprocess.Popen(
        [sys.executable, str(PROGRAM), str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        tcp, tcp6, udp = program.stdout.readline().split()
        found = expose([program.pid])
        reached = {(item.kind, item.name): (item.reach, item.designed) for item in found.items}
        program.communicate("")
    for thing, reach in {
        ("tcp", f"0.0.0.0:{tcp}"): Reach.NETWORK,
        ("tcp", f"[::1]:{tcp6}"): Reach.HOST,
        ("udp", f"127.0.0.1:{udp}"): Reach.HOST,
        ("abstract", f"@not-ours-{program.pid}"): Reach.HOST,
        ("unix", f"{folder}/wide"): Reach.HOST,
        ("unix", f"{folder}/near"): Reach.HOST,
        ("unix", f"{folder}/by"): Reach.HOST,
        ("file", f"{folder}/open"): Reach.HOST,
        ("fifo", f"{folder}/fifo"): Reach.HOST,
        ("shm", f"/dev/shm/not-ours-{program.pid}"): Reach.HOST,
    }.items():
        assert reached[thing] == (reach, False), thing
    assert reached["unix", f"{folder}/tight"] == (Reach.USER, True)
    assert reached["file", f"{folder}/closed"] == (Reach.USER, True)


def test_a_closed_folder_above_closes_what_is_below(tmp_path: Path) -> None:
    inner = tmp_path / "closed"
    inner.mkdir(mode=0o700)
    (inner / "open").write_text("")
    (inner / "open").chmod(0o666)
    program = f"import sys; file = open({str(inner / 'open')!r}, 'w'); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        items = [item for item in expose([process.pid]).items if item.name == str(inner / "open")]
        process.communicate("")
    assert [(item.mode, item.reach, item.designed) for item in items] == [(0o666, Reach.USER, True)]


def test_what_cannot_be_looked_at_and_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ProcessLookupError, match="4194305"):
        expose([4194305])  # beyond the kernel's PID_MAX_LIMIT
    command = [sys.executable, "-m", "skipper.dataplane.doctor"]
    for wrong in (["--pid", "1"], ["--asked", "x"], ["--exposure", "--pid", "4194305"]):
        assert subprocess.run([*command, *wrong], cwd=ROOT, capture_output=True, timeout=60).returncode == 2
