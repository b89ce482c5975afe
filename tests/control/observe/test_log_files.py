"""Files of what processes say: their form, their bounds, their modes, and what becomes of those of earlier jobs."""

import json
import logging
import os
import stat
import threading
from pathlib import Path

import pytest

from skipper.control.observe import log_files
from skipper.control.observe.log_files import (
    FOLDER_VARIABLE,
    JOB_FILE,
    PROCESSES_FILE,
    LogFiles,
    about_job,
    folders_home,
    is_running,
    jobs_with_files,
    remove_old,
    stamped,
)
from skipper.control.observe.log_reader import LogSource

TRAINER = "procs{'gpus': 3}"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "of jobs"
    monkeypatch.setenv(FOLDER_VARIABLE, str(home))
    return home


def test_lines_are_those_of_container_logs() -> None:
    assert stamped(b"one\ntwo\nthr", 1, 0.25) == (
        b"1970-01-01T00:00:00.250000Z stdout F one\n"
        b"1970-01-01T00:00:00.250000Z stdout F two\n"
        b"1970-01-01T00:00:00.250000Z stdout P thr\n"
    )
    assert stamped(b"\n", 2, 0.0) == b"1970-01-01T00:00:00.000000Z stderr F \n"


def test_nothing_is_made_before_somebody_says_something(home: Path) -> None:
    files = LogFiles(None, "abc")
    assert files.folder is None
    assert not home.exists()
    files.keep(LogSource(-1, 1, TRAINER, 7), b"hello\n")
    files.close()
    assert files.folder is not None
    assert sorted(path.name for path in files.folder.iterdir()) == [JOB_FILE, PROCESSES_FILE, "procs-gpus=3-7.log"]
    assert about_job(files.folder)["job"] == "abc"
    assert is_running(about_job(files.folder))


def test_all_of_it_is_this_users_alone(home: Path) -> None:
    before = os.umask(0)
    try:
        files = LogFiles(None, "abc")
        files.keep(LogSource(-1, 1, TRAINER, 7), b"hello\n")
    finally:
        os.umask(before)
    files.close()
    assert files.folder is not None
    assert [stat.S_IMODE(path.stat().st_mode) for path in (home, files.folder)] == [0o700, 0o700]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files.folder.iterdir()} == {0o600}


def test_a_folder_where_others_may_write_is_not_used(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    home.mkdir()
    home.chmod(0o777)
    files = LogFiles(None, "abc")
    with caplog.at_level(logging.WARNING, "skipper.control"):
        files.keep(LogSource(-1, 1, TRAINER, 7), b"hello\n")
        files.keep(LogSource(-1, 1, TRAINER, 7), b"hello\n")
    assert len(caplog.records) == 1
    assert FOLDER_VARIABLE in caplog.text
    assert not list(home.iterdir())


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "procs-gpus=3-7.log").symlink_to(tmp_path / "elsewhere")
    files = LogFiles(tmp_path / "logs", "abc")
    files.keep(LogSource(-1, 1, TRAINER, 7), b"hello\n")
    assert "no longer saved" in caplog.text
    assert not (tmp_path / "elsewhere").exists()


def test_what_is_kept_of_a_process_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "MIN_PROCESS_NBYTES", 1000)
    monkeypatch.setattr(log_files, "MAX_PROCESS_NBYTES", 100_000)
    files = LogFiles(tmp_path, "abc")
    for number in range(3000):
        files.keep(LogSource(-1, 1, TRAINER, 7), b"%d: %s\n" % (number, b"x" * 100))
        if number == 300:  # fewer than two files take
            assert files.is_whole
    files.close()
    assert not files.is_whole
    kept = [tmp_path / "procs-gpus=3-7.log.1", tmp_path / "procs-gpus=3-7.log"]
    assert sum(path.stat().st_size for path in kept) <= 100_000 + 1000
    numbers = [int(line.split()[3][:-1]) for path in kept if path.exists() for line in path.read_bytes().splitlines()]
    assert numbers == list(range(numbers[0], 3000))
    assert len(numbers) > 300


def test_few_files_are_open_at_once(tmp_path: Path) -> None:
    files = LogFiles(tmp_path, "abc")
    before = len(os.listdir("/proc/self/fd"))
    for turn in range(2):
        for pid in range(200):
            files.keep(LogSource(-1, 1, TRAINER, pid), b"turn %d\n" % turn)
    assert len(os.listdir("/proc/self/fd")) - before <= 64
    files.close()
    assert len(list(tmp_path.glob("*.log"))) == 200
    assert (tmp_path / "procs-gpus=3-0.log").read_bytes().count(b"turn") == 2


def test_names_of_processes_are_no_paths(tmp_path: Path) -> None:
    files = LogFiles(tmp_path / "logs", "abc")
    for name in ("../../etc/passwd", "..", "a/b", "x" * 1000, "\0"):
        files.keep(LogSource(-1, 1, name, 7, "10.0.0.1:7"), b"hello\n")
    files.close()
    assert len(list((tmp_path / "logs").glob("*.log"))) == 5
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]


def test_folders_of_ended_jobs_go_and_those_of_running_ones_stay(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running = LogFiles(None, "running")
    running.keep(LogSource(-1, 1, TRAINER, 7), b"hello\n")
    running.close()
    assert running.folder is not None
    for thread in threading.enumerate():
        if thread.name == "control-logs-old":
            thread.join()
    about = about_job(running.folder)
    for number in range(5):
        ended = home / f"2026010{number}-000000-ended{number}"
        ended.mkdir()
        (ended / JOB_FILE).write_text(json.dumps({**about, "start": 1}))
    (home / "of somebody else").mkdir()
    monkeypatch.setattr(log_files, "KEPT_JOBS", 2)
    remove_old(home, "current")
    left = [folder.name for folder in jobs_with_files(home)]
    assert left == [running.folder.name, "20260104-000000-ended4", "20260103-000000-ended3"]
    monkeypatch.setattr(log_files, "MAX_KEPT_NBYTES", 1)
    remove_old(home, "current")
    assert [folder.name for folder in jobs_with_files(home)] == [running.folder.name]
    assert (home / "of somebody else").is_dir()


def test_without_a_home_they_lie_where_temporary_files_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert folders_home() == tmp_path / "state" / "skipper" / "logs"
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nothing")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if os.geteuid() == 0:
        monkeypatch.setattr(os, "access", lambda path, _: not str(path).startswith("/proc"))
    assert folders_home() == tmp_path / f"skipper-{os.geteuid()}-logs"
