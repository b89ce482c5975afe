"""A run that has ended, as the dashboard shows it: what its record tells, in a real browser, too."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from skipper.control import ActorMesh, JobNotFoundError
from skipper.control.observe import Dashboard, job_status
from skipper.control.observe.log_files import LogFiles, of_process
from skipper.control.observe.log_reader import LogSource
from skipper.control.observe.record import FOLDER_VARIABLE, Record, RecordWriter, new_folder
from skipper.control.observe.recorded_job import RecordedJob
from tests.control.actors import Echo
from tests.control.conftest import PATIENCE_S
from tests.control.observe.browser import PATIENCE_MS, browsers, needs_chromium

expect.set_options(timeout=PATIENCE_MS)

RANK_1 = "echoes{'gpus': 1}"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    yield from browsers()


def write(folder: Path, **about: object) -> RecordWriter:
    record = RecordWriter(folder)
    record.describe({**of_process(os.getpid(), "", "train.py"), "name": "train", **about})
    return record


@pytest.fixture
def recorded(echoes: ActorMesh[Echo], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordedJob:
    """A run in which both ranks failed alike, one of them three times, and a process was killed."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "records"))
    echoes.pid.call().get(PATIENCE_S)
    status = job_status()
    logs = tmp_path / "logs"
    logs.mkdir()
    files = LogFiles(logs, "ended")
    worker = status.processes[-1]
    files.keep(LogSource(-1, 2, worker.name, worker.pid or 0, actors=("echoes",)), b"the last words\n")
    files.close()
    folder = new_folder("train")
    record = write(folder, pid=2**30, ended_s=time.time(), outcome="was killed by signal 9 (SIGKILL)")
    kind = {"error": "KeyError", "place": "train.py:7"}
    for rank, count, trace in ((0, 1, {"traceback": "Traceback of train.py"}), (1, 1, {}), (1, 2, {})):
        process = f"workers{{'gpus': {rank}}}"
        who = f"echoes{{'gpus': {rank}}}.step"
        record.event("error", who, "KeyError: 'x'", at_s=5.0 + count, process=process, count=count, **kind, **trace)
    gone = {**kind, "process": "ended", "count": 1, "traceback": "Traceback of train.py"}
    record.event("error", "ended.step", "KeyError: 'x'", at_s=8.5, **gone)
    record.event("death", "workers{'gpus': 0}", "pid 7 was killed", at_s=9.0)
    record.event("logs", "script", str(logs))
    record.stacks("", "old")
    record.stacks("workers{'gpus': 1} did not answer", "File train.py, line 7")
    record.status(status)
    record.close()
    return RecordedJob(Record(folder))


def test_errors_deaths_stacks_and_output_are_those_of_the_record(recorded: RecordedJob) -> None:
    status = recorded.status()
    assert (recorded.name, recorded.outcome) == ("train", "was killed by signal 9 (SIGKILL)")
    report = status.processes[0].report
    assert report is not None
    assert [event.who for event in report.deaths] == ["workers{'gpus': 0}"]
    assert len(report.errors) == 4
    ids = {process.id: process.name for process in status.processes}
    found = {ids.get(errors.process_id, "gone"): errors.groups for errors in recorded.errors()}
    assert found["gone"][0].who == "ended.step"
    (group,) = found["workers{'gpus': 1}"]
    assert (group.who, group.error, group.place, group.count) == (f"{RANK_1}.step", "KeyError", "train.py:7", 3)
    assert (group.first_s, group.last_s, group.traceback) == (6.0, 7.0, "Traceback of train.py")
    assert found["workers{'gpus': 0}"][0].count == 1
    assert {stacks.name for stacks in recorded.stacks()} == set(ids.values())
    assert {stacks.text for stacks in recorded.stacks()} == {"File train.py, line 7"}
    assert recorded.output().name == "logs"


def test_a_record_that_holds_nothing_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "record"
    folder.mkdir(mode=0o700)
    write(folder, pid=2**30, ended_s=5.0).close()
    job = RecordedJob(Record(folder))
    for ask in (job.status, job.errors, job.stacks, job.output):
        with pytest.raises(JobNotFoundError):
            ask()


def test_a_run_that_goes_on_is_shown_by_its_job(tmp_path: Path) -> None:
    folder = tmp_path / "record"
    folder.mkdir(mode=0o700)
    write(folder).close()
    with pytest.raises(ValueError, match="has not ended yet: use skipper dashboard --job train"):
        RecordedJob(Record(folder))


@needs_chromium
def test_the_page_says_that_it_is_a_record_and_has_all_of_it(browser: Browser, recorded: RecordedJob) -> None:
    with (
        Dashboard(recorded, 0, "127.0.0.1", None, interval_s=0.2) as dashboard,
        browser.new_context() as context,
    ):
        page = context.new_page()
        page.goto(dashboard.url)
        expect(page.locator("#health")).to_have_text("ended")
        expect(page.locator("#banner")).to_contain_text("train was killed by signal 9 (SIGKILL)")
        expect(page.locator("#freshness")).to_contain_text("as of")
        expect(page.locator("li.event[data-kind=death]")).to_contain_text("pid 7 was killed")
        expect(page.locator("#events li[data-error=KeyError] .times")).to_have_text("\u00d75")
        page.locator("tr.process a", has_text="workers{'gpus': 1}").click()
        expect(page.locator(".groups .times")).to_have_text("\u00d73")
        page.get_by_role("button", name="Take stacks").click()
        expect(page.get_by_label("Stacks").locator("pre")).to_contain_text("File train.py, line 7")
        expect(page.locator(".line .said")).to_have_text("the last words")
