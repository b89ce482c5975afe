"""What a job has written, read from its files, also while they grow."""

import json
from pathlib import Path

import pytest

from skipper.control.model.errors import JobNotFoundError
from skipper.control.observe import log_files
from skipper.control.observe.log_files import JOB_FILE, LogFiles, about_job
from skipper.control.observe.log_history import JobLog, WrittenBy, decode_processes, decode_record, find_job
from tests.control.observe.job_output import folder_of, source


def test_lines_come_in_the_order_of_time_and_say_whose_they_are(files: LogFiles) -> None:
    for step in range(3):
        for rank in range(2):
            files.keep(source(rank), b"step %d\n" % step)
    with JobLog(folder_of(files)) as log:
        entries = list(log.entries())
    assert [entry.at_s for entry in entries] == sorted(entry.at_s for entry in entries)
    assert [(entry.label, entry.text) for entry in entries] == [
        ("trainers gpus=0", "first"),
        *[(f"trainers gpus={rank}", f"step {step}") for step in range(3) for rank in range(2)],
    ]
    assert (entries[0].process, entries[0].pid, entries[0].stream) == ("procs{'gpus': 0}", 100, "stdout")


def test_parts_of_a_line_are_put_together_and_streams_stay_apart(files: LogFiles) -> None:
    for stream, part in (
        (1, b"out"),
        (2, b"err"),
        (1, b" and"),
        (2, b"or\n"),
        (1, b" more\nlast \r1 %"),
        (1, b"\r2 %"),
    ):
        files.keep(source(0, stream), part)
    with JobLog(folder_of(files)) as log:
        said = [(entry.stream, entry.text) for entry in log.entries()][1:]
        assert sorted(said) == [("stderr", "error"), ("stdout", "out and more")]
        assert [entry.text for entry in log.rest()] == ["2 %"]


def test_what_comes_is_followed_until_the_job_has_ended(files: LogFiles) -> None:
    with JobLog(folder_of(files)) as log:
        entries = log.follow()
        assert next(entries).text == "first"
        files.keep(source(1), b"second\n")
        assert next(entries).text == "second"
        files.keep(source(1), b"without an end")
        files.close()
        about = about_job(folder_of(files))
        (folder_of(files) / JOB_FILE).write_text(json.dumps({**about, "start": 1}))
        assert [entry.text for entry in entries] == ["without an end"]


def test_a_full_file_is_read_to_its_end_and_then_the_next_one(files: LogFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "MAX_PROCESS_NBYTES", 20_000)
    monkeypatch.setattr(log_files, "MIN_PROCESS_NBYTES", 1000)
    with JobLog(folder_of(files)) as log:
        texts = [entry.text for entry in log.entries()]
        for number in range(500):
            files.keep(source(0), b"line %d\n" % number)
            texts += [entry.text for entry in log.entries()]
    assert texts == ["first", *[f"line {number}" for number in range(500)]]
    with JobLog(folder_of(files)) as log:
        kept = [entry.text for entry in log.entries()]
    assert kept == texts[-len(kept) :]
    assert len(kept) > 150


def test_what_is_no_record_is_passed_over(files: LogFiles) -> None:
    with open(folder_of(files) / "procs-gpus=0-100.log", "ab") as file:
        file.write(b"no record\n2026-02-31T00:00:00.000000Z stdout F x\n\n" + b"x" * (3 << 20) + b"\n")
    files.keep(source(0), b"last\n")
    with JobLog(folder_of(files)) as log:
        assert [entry.text for entry in log.entries()] == ["first", "last"]


def test_a_moment_is_read_as_it_was_written() -> None:
    assert decode_record(b"2026-01-01T00:00:00.250000Z stderr P a b ") == (1767225600.25, "stderr", False, b"a b ")
    assert decode_record(b"2026-01-01T00:00:00.250000Z stderr X a b ") is None


def test_files_elsewhere_are_not_read() -> None:
    said = {"name": "n", "pid": 1, "host": "", "actors": []}
    lines = [json.dumps({**said, "file": file}) for file in ("../x.log", "a.log", "a.txt")]
    assert [by.file for by in decode_processes("\n".join([*lines, "{", "[]", "7"]).encode())] == ["a.log"]


@pytest.mark.parametrize(
    ("word", "is_meant"),
    [
        ("workers", True),
        ("trainers", True),
        ("work", False),
        ("trainers[1,3]", True),
        ("trainers:1,3", True),
        ("trainers[gpus=3]", True),
        ("trainers[gpus=3, hosts=1]", True),
        ("trainers[gpus=2]", False),
        ("trainers[3]", False),
        ("workers{'hosts': 1, 'gpus': 3}", True),
        ("100", True),
        ("101", False),
        ("trainers[", False),
    ],
)
def test_words_choose_processes(word: str, is_meant: bool) -> None:
    by = WrittenBy("x.log", "workers{'hosts': 1, 'gpus': 3}", 100, "", ("trainers",))
    assert by.is_meant_by(word) is is_meant


def test_a_job_is_found_by_its_id_its_script_its_folder_and_as_the_latest(files: LogFiles, tmp_path: Path) -> None:
    folder = folder_of(files)
    (folder / JOB_FILE).write_text(json.dumps({**about_job(folder), "script": "/home/a/train.py"}))
    for job in (None, "abc", "train", "train.py", folder.name, str(folder)):
        assert find_job(job) == folder
    ended = tmp_path / "99990101-000000-later"
    ended.mkdir()
    (ended / JOB_FILE).write_text(json.dumps({**about_job(folder), "start": 1}))
    assert find_job(None) == folder, "it runs"
    with pytest.raises(JobNotFoundError, match="no output of a job 'other'"):
        find_job("other")
