"""The end of what a job writes, followed without reading all of it, holding no file open, whatever is written."""

import os
from pathlib import Path

import pytest

from skipper.control.observe import log_files, log_tail
from skipper.control.observe.log_files import SUFFIX, LogFiles
from skipper.control.observe.log_tail import KEPT_ENTRIES, MOST_TEXT, OutputTail, TailView
from tests.control.observe.job_output import folder_of, source


def said(view: TailView) -> list[str]:
    return [entry.text for _, entry in view.entries]


def test_what_comes_is_numbered_and_told_once(files: LogFiles) -> None:
    tail = OutputTail(folder_of(files), "")
    first = tail.look(0)
    assert said(first) == ["first"]
    assert first.is_running
    files.keep(source(0), b"second\nthi")
    files.keep(source(1), b"of another\n")
    second = tail.look(first.last)
    assert said(second) == ["second", "of another"]
    files.keep(source(0), b"rd\n")
    assert said(tail.look(second.last)) == ["third"]
    assert said(tail.look(0)) == ["first", "second", "of another", "third"]
    assert [by.name for by in second.processes] == ["procs{'gpus': 0}", "procs{'gpus': 1}"]


@pytest.mark.parametrize("who", ["trainers[1]", "procs[gpus=1]", "101"])
def test_only_those_who_are_named_are_read(files: LogFiles, who: str) -> None:
    files.keep(source(1), b"mine\n")
    tail = OutputTail(folder_of(files), who)
    view = tail.look(0)
    assert said(view) == ["mine"]
    assert len(view.processes) == 2


def test_a_file_that_was_full_is_read_on_in_the_next(files: LogFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "MIN_PROCESS_NBYTES", 1000)
    monkeypatch.setattr(log_files, "MAX_PROCESS_NBYTES", 1000)
    tail = OutputTail(folder_of(files), "")
    last, found = 0, []
    for number in range(100):
        files.keep(source(0), b"line %d\n" % number)
        view = tail.look(last)
        last, found = view.last, [*found, *said(view)]
    assert found == ["first", *(f"line {number}" for number in range(100))]
    assert view.skipped_nbytes == 0


def test_a_flood_is_passed_over_and_counted(files: LogFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_tail, "MAX_FILE_NBYTES", 4000)
    monkeypatch.setattr(log_tail, "MIN_FILE_NBYTES", 4000)
    for number in range(1000):
        files.keep(source(0), b"before %d\n" % number)
    tail = OutputTail(folder_of(files), "")
    view = tail.look(0)
    assert said(view)[-1] == "before 999"
    assert 10 < len(view.entries) < 200
    assert view.skipped_nbytes == 0  # nobody has looked before
    for number in range(1000):
        files.keep(source(0), b"after %d\n" % number)
    flood = tail.look(view.last)
    assert said(flood)[-1] == "after 999"
    assert 10 < len(flood.entries) < 200
    assert flood.skipped_nbytes > 10_000


def test_lines_are_kept_up_to_a_bound_and_long_ones_cut(files: LogFiles) -> None:
    tail = OutputTail(folder_of(files), "")
    tail.look(0)
    for number in range(KEPT_ENTRIES + 10):
        files.keep(source(0), b"%d\n" % number)
    files.keep(source(0), b"x" * (MOST_TEXT + 7) + b"\n")
    view = tail.look(0)
    assert len(view.entries) == KEPT_ENTRIES
    assert said(view)[-1] == "x" * MOST_TEXT + " … 7 characters more"


def test_no_file_stays_open_and_links_are_not_followed(files: LogFiles, tmp_path: Path) -> None:
    for rank in range(20):
        files.keep(source(rank), b"line\n")
    folder, secret = folder_of(files), tmp_path / "secret"
    secret.write_bytes(b"2026-11-29T00:00:00.000000Z stdout F secret\n")
    path = next(folder.glob(f"*gpus=7*{SUFFIX}"))
    path.unlink()
    path.symlink_to(secret)
    before = len(os.listdir("/proc/self/fd"))
    tail = OutputTail(folder, "")
    view = tail.look(0)
    assert "secret" not in said(view)
    assert said(view).count("line") == 19
    assert len(os.listdir("/proc/self/fd")) == before


def test_of_a_job_that_has_ended_the_last_part_of_a_line_is_told(
    files: LogFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.keep(source(0), b"no end")
    tail = OutputTail(folder_of(files), "")
    view = tail.look(0)
    assert said(view) == ["first"]
    monkeypatch.setattr(log_tail, "is_running", lambda about: False)
    rest = tail.look(view.last)
    assert (said(rest), rest.is_running) == (["no end"], False)


def test_a_folder_that_is_gone_is_empty(tmp_path: Path) -> None:
    view = OutputTail(tmp_path / "none", "").look(0)
    assert (view.entries, view.processes, view.is_running) == ([], [], False)
