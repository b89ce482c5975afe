"""Hosts that are processes of this machine."""

import os
import signal
import stat
from pathlib import Path

import pytest

from skipper.control import configure, shutdown
from skipper.control.cluster.jobs import LocalJob, PlaceState
from skipper.control.model.errors import JobError
from skipper.control.model.settings import adopt
from tests.control.conftest import PATIENCE_S, alive, wait_until
from tests.jobs.conftest import greeted


def test_places_have_addresses_of_their_own() -> None:
    with LocalJob(3) as job:
        names = job.hosts(timeout=PATIENCE_S).names
        assert [name.rpartition(":")[0] for name in names] == ["127.0.0.2", "127.0.0.3", "127.0.0.4"]


def test_two_jobs_do_not_meet() -> None:
    with LocalJob(1) as one, LocalJob(1) as other:
        assert greeted(one.hosts(timeout=PATIENCE_S)) == [0]
        assert greeted(other.hosts(timeout=PATIENCE_S)) == [0]
        one.cancel()
        assert one.state() is PlaceState.ENDED
        assert greeted(other.hosts()) == [0]


def test_logs_stay_in_the_folder_that_was_named(tmp_path: Path) -> None:
    with LocalJob(1, folder=tmp_path) as job:
        job.hosts(timeout=PATIENCE_S)
    [log] = tmp_path.glob("skipper-job-*/logs/*.log")
    assert "attached this host" in log.read_text()
    assert stat.S_IMODE(log.parents[1].stat().st_mode) == 0o700
    assert job.logs(0) == log.read_text()


def test_a_folder_that_cannot_be_made_is_told_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    job = LocalJob(1, folder=tmp_path / "file" / "jobs")
    with pytest.raises(JobError, match="cannot make the folder of the job"):
        job.start()
    with pytest.raises(JobError, match="has not been started"):
        job.state()


def test_an_agent_that_stands_still_is_ended_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skipper.control.cluster.jobs.local._END_S", 0.5)
    shutdown()  # a job keeps its heartbeat
    before = configure()
    configure(heartbeat_s=1.0)
    try:
        with LocalJob(1) as job:
            job.hosts(timeout=PATIENCE_S)
            agent = int(job.places()[0].name.removeprefix("pid "))
            os.kill(agent, signal.SIGSTOP)
        wait_until(lambda: not alive(agent), "the agent is gone")
    finally:
        adopt(before)
