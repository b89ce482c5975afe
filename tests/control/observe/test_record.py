"""The folder of a record: what it holds comes back, how many there are is bounded, and what is damaged does no harm."""

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any, cast

import pytest

from skipper.control import ActorMesh, JobNotFoundError, ServedJob, UnsafeFileError
from skipper.control.observe import job_status
from skipper.control.observe.log_files import of_process
from skipper.control.observe.record import (
    FOLDER_VARIABLE,
    KEPT_RUNS,
    Record,
    RecordWriter,
    find_record,
    name_for,
    new_folder,
    records,
)
from skipper.control.observe.record_answer import RecordAnswer
from skipper.control.observe.recorder import Changes, pause_s
from skipper.control.observe.status import JobStatus, ProcessStatus
from skipper.control.observe.status_json import decode_status
from skipper.control.runtime.history import ErrorGroup, Event
from skipper.control.runtime.status_providers import Occurrence, Table, report_table
from tests.control.actors import Echo


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "records"))
    return tmp_path / "records"


def ended(name: str, **more: object) -> Path:
    """The folder of a run that has ended."""
    folder = new_folder(name)
    about = {**of_process(os.getpid(), "", "train.py"), "name": name, "ended_s": time.time(), "outcome": "ended well"}
    RecordWriter(folder).describe({**about, "pid": 2**30, **more})
    return folder


def as_read(status: JobStatus) -> dict[str, Any]:
    """A status as JSON has it, where a tuple is a list."""
    return cast("dict[str, Any]", json.loads(json.dumps(status.to_dict())))


def test_a_status_comes_back_as_it_was(served: ServedJob, echoes: ActorMesh[Echo]) -> None:
    report_table("test", lambda: Table("shown", ("a", "b"), [(1.5, "x"), (None, 2)]))
    try:
        status = job_status()
    finally:
        report_table("test", None)
    data = as_read(status)
    assert as_read(decode_status(data)) == data
    data["processes"][0]["report"].pop("figures")  # of an earlier version
    data["later"] = "unknown"
    assert decode_status(data).processes[0].report.figures == {}


@pytest.mark.parametrize(
    "data",
    [{}, {"job": "a", "taken_s": 1.0, "processes": 3}, {"job": 1, "taken_s": 1.0, "processes": []}, {"job": "a"}],
)
def test_what_is_no_status_is_refused(data: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not a status"):
        decode_status(data)


def test_what_is_written_is_read_while_it_goes_on(home: Path, served: ServedJob) -> None:
    folder = new_folder("train")
    record = RecordWriter(folder)
    record.describe({**of_process(os.getpid(), "", "train.py"), "name": "train"})
    status = job_status()
    record.status(status)
    record.event("death", "worker", "was killed", at_s=5.0, pid=7)
    record.event("error", "a.b", "ValueError: no", at_s=4.0, traceback="Traceback\n")
    record.stacks("it hangs", "script\n")
    read = Record(folder)
    assert read.is_running
    assert read.outcome == "runs"
    assert [as_read(each) for each in read.statuses()] == [as_read(status)]
    assert [(event.kind, event.who, event.traceback, dict(event.more)) for event in read.events()] == [
        ("error", "a.b", "Traceback\n", {}),
        ("death", "worker", "", {"pid": 7}),
    ]
    assert [(stacks.why, stacks.text) for stacks in read.stacks()] == [("it hangs", "script\n")]
    record.close()
    record.event("late", "x", "y")
    assert len(read.events()) == 2


def test_everything_is_for_this_user_alone(home: Path, served: ServedJob) -> None:
    before = os.umask(0)
    try:
        folder = ended("train")
        RecordWriter(folder).status(job_status())
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in [home, folder, *folder.iterdir()]}
    assert {name: mode for name, mode in modes.items() if mode & 0o077} == {}
    assert len(modes) == 4


def test_only_so_many_records_are_kept_and_none_of_a_run_that_goes_on(home: Path) -> None:
    running = new_folder("running")
    RecordWriter(running).describe({**of_process(os.getpid(), "", ""), "name": "running"})
    for number in range(KEPT_RUNS + 3):
        ended(f"run{number:02}")
    new_folder("last")
    found = [record.name for record in records(home)]
    assert len(found) == KEPT_RUNS + 1
    assert "running" in found
    assert "run00" not in found


def test_a_record_is_found_by_its_folder_and_by_its_name(home: Path, tmp_path: Path) -> None:
    with pytest.raises(JobNotFoundError, match="skipper run makes them"):
        find_record(None)
    first, other = ended("train"), ended("other")
    second = ended("train")
    assert find_record("train").folder == second
    assert find_record(str(first)).folder == first
    assert find_record(first.name).folder == first
    assert find_record("other").folder == other
    for word in ("nobody", str(tmp_path)):
        with pytest.raises(JobNotFoundError):
            find_record(word)


def test_the_run_that_began_last_comes_first_whatever_the_names_of_the_folders(home: Path) -> None:
    began_s = time.time()
    ended("z", began_s=began_s)
    ended("a", began_s=began_s + 0.25)  # in the same second
    newest = ended("newest", began_s=began_s + 3)
    newest.rename(newest.with_name("20260101-000000-newest"))  # the local time was set back meanwhile
    assert [record.name for record in records(home)] == ["newest", "a", "z"]
    assert find_record(None).name == "newest"


def test_a_folder_of_ones_own_has_to_be_empty(home: Path, tmp_path: Path) -> None:
    assert new_folder("train", tmp_path / "mine") == tmp_path / "mine"
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o700
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(FileExistsError, match="not empty"):
        new_folder("train", tmp_path / "mine")


def test_a_home_that_others_may_write_to_is_refused(home: Path) -> None:
    home.mkdir(mode=0o777)
    home.chmod(0o777)
    with pytest.raises(UnsafeFileError, match=FOLDER_VARIABLE):
        new_folder("train")


def test_a_damaged_record_is_shown_as_far_as_it_goes(home: Path) -> None:
    folder = ended("train", began_s="yesterday")
    (folder / "status.jsonl").write_text('{"job": "a"}\n{"job"')
    (folder / "events.jsonl").write_text('{"kind": "death"}\n{"at_s": "x", "kind": 1, "who": 2, "message": 3}\n{}\n')
    (folder / "stacks.jsonl").write_text(
        '{}\n{"at_s": 1e300, "why": "", "text": ""}\n{"at_s": NaN, "why": "", "text": ""}\n'
    )
    read = Record(folder)
    assert (list(read.statuses()), read.events(), read.stacks(), read.began_s) == ([], [], [], 0.0)
    (folder / "job.json").write_text("[]")
    with pytest.raises(JobNotFoundError, match="holds no record"):
        Record(folder)


@pytest.mark.parametrize(
    ("script", "name"),
    [("train.py", "train"), ("/a/b c.py", "b-c"), ("pkg.mod", "pkg.mod"), ("..py", "run"), ("ü.py", "run")],
)
def test_a_run_is_called_as_its_script(script: str, name: str) -> None:
    assert name_for(script) == name


# What is new at a look

GROUP = ErrorGroup("a.step", "ValueError", "x.py:3", 1, 10.0, 10.0, "ValueError: no", "Traceback ...")


class Job:
    """One process that says what a test wants, and what of it is written down."""

    def __init__(self, folder: Path, status: JobStatus) -> None:
        self._folder = folder
        self._changes = Changes(RecordWriter(folder))
        script = next(iter(status.processes))
        assert script.report is not None
        self._report = script.report
        self._status = status
        self._script = script
        self._seen = 0

    def look(self, state: str = "up", processes: int = 1, **said: object) -> list[tuple[str, str]]:
        """Kinds and words of the events of a look."""
        given = {"errors": (), "deaths": (), "occurrences": {}, "logs": "", **said}
        shown: list[ProcessStatus] = [
            dataclasses.replace(self._script, id=f"p{number}", name=f"p{number}", state=state, problem="no answer")
            for number in range(processes)
        ]
        status = dataclasses.replace(self._status, processes=shown)
        answer = RecordAnswer(self._report, **given)
        self._changes.note(status, {each.id: answer if state == "up" else None for each in shown})
        (self._folder / "events.jsonl").touch()
        lines = (self._folder / "events.jsonl").read_text().splitlines()
        new, self._seen = lines[self._seen :], len(lines)
        self.lines = [json.loads(line) for line in new]
        return [(line["kind"], line["message"]) for line in self.lines]


@pytest.fixture
def job(tmp_path: Path, served: ServedJob) -> Job:
    return Job(tmp_path, job_status())


def test_errors_that_are_alike_have_one_traceback_and_are_counted(job: Job) -> None:
    job.look(processes=2)
    assert job.look(processes=2, errors=[GROUP]) == [("error", "ValueError: no")] * 2
    assert [("traceback" in line, line["count"], line["process"]) for line in job.lines] == [
        (True, 1, "p0"),
        (False, 1, "p1"),
    ]
    assert job.look(processes=2, errors=[GROUP]) == []
    job.look(errors=[dataclasses.replace(GROUP, count=40, last_s=12.0)])
    assert [(line["kind"], line.get("count"), line["at_s"]) for line in job.lines if line["kind"] == "error"] == [
        ("error", 39, 12.0)
    ]
    assert job.look(errors=[dataclasses.replace(GROUP, count=2)]) == [("error", "ValueError: no")]
    assert job.lines[0]["count"] == 2  # the process had forgotten those before


def test_deaths_and_syncs_are_written_down_once(job: Job) -> None:
    job.look()
    sync = Occurrence(20.0, "put policy version 3", {"nbytes": 5, "store": "s"})
    said = {"deaths": [Event(11.0, "w", "was killed")], "occurrences": {"torchstore": [sync]}, "logs": "/x"}
    assert job.look(**said) == [("death", "was killed"), ("sync", "put policy version 3"), ("logs", "/x")]
    assert job.lines[1]["figures"] == {"nbytes": 5, "store": "s"}
    assert job.look(**said) == []


def test_who_comes_goes_and_falls_silent_is_written_down(job: Job) -> None:
    assert job.look(processes=2) == [("process", "it is there")] * 2
    assert job.look(processes=1) == [("gone", "it no longer exists")]
    assert job.look("silent") == [("silent", "no answer")]
    assert job.look("silent") == []
    assert job.look() == [("answers", "it answers again")]


@pytest.mark.parametrize(
    ("interval_s", "took_s", "used_cpu_s", "pause"),
    [
        (1.0, 0.02, 0.01, 0.98),
        (1.0, 0.5, 0.1, 0.9),
        (1.0, 3.0, 0.01, 0.09),
        (1.0, 0.4, 0.4, 3.6),
        (60.0, 0.4, 0.4, 59.6),
    ],
)
def test_looks_take_a_tenth_of_a_cpu_at_most(interval_s: float, took_s: float, used_cpu_s: float, pause: float) -> None:
    assert pause_s(interval_s, took_s, used_cpu_s) == pytest.approx(pause)
