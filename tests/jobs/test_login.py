"""Hosts that are logged in to. The login of the tests runs a line in a shell of this machine, whatever the host."""

import os
import sys
from pathlib import Path

import psutil
import pytest

from skipper.control.cluster.hosts import command
from skipper.control.cluster.jobs import LoginJob, PlaceState
from skipper.control.model.errors import JobFailedError
from tests.control.conftest import PATIENCE_S, REPOSITORY, wait_until
from tests.jobs.conftest import greeted

LOGIN = ("sh", "-c", 'exec sh -c "$2"', "login")
HOSTS = ("127.0.0.5", "somebody@127.0.0.6")
HERE = {"login": LOGIN, "python": sys.executable, "setup": (f"export PYTHONPATH={REPOSITORY}", "export LOGIN=yes")}


def test_agents_are_started_by_logins_and_end_with_them() -> None:
    with LoginJob(HOSTS, **HERE) as job:
        hosts = job.hosts(timeout=PATIENCE_S)
        assert [name.rpartition(":")[0] for name in hosts.names] == ["127.0.0.5", "127.0.0.6"]
        assert greeted(hosts) == [0, 1]
        assert "attached this host" in job.logs(1)
        agents = [child for child in psutil.Process().children() if "skipper.control.cluster.hosts" in child.cmdline()]
        assert len(agents) == 2
        secret = job.engine.secret_file.read_text().strip()
        assert not any(secret in word for agent in agents for word in agent.cmdline())
    assert job.state() is PlaceState.ENDED
    assert not any(agent.is_running() for agent in agents)


def test_a_lost_host_is_logged_in_to_again() -> None:
    with LoginJob(HOSTS[:1], **HERE) as job:
        job.hosts(timeout=PATIENCE_S)
        [agent] = [child for child in psutil.Process().children() if "skipper.control.cluster.hosts" in child.cmdline()]
        agent.kill()
        wait_until(lambda: job.state() is PlaceState.FAILED, "the loss is seen")
        assert greeted(job.replace(timeout=PATIENCE_S)) == [0]


def test_a_login_that_fails_is_told_with_what_it_said(tmp_path: Path) -> None:
    with (
        LoginJob(HOSTS[:1], login=("sh", "-c", "echo no such user; exit 255"), folder=tmp_path) as job,
        pytest.raises(JobFailedError, match="no such user"),
    ):
        job.hosts(timeout=PATIENCE_S)


def test_bad_machines_are_refused() -> None:
    with pytest.raises(ValueError, match="list of names"):
        LoginJob("127.0.0.5")
    with pytest.raises(ValueError, match="twice"):
        LoginJob(["127.0.0.5", "127.0.0.5"])
    with pytest.raises(ValueError, match="at least"):
        LoginJob([])
    with pytest.raises(ValueError, match="cannot be resolved"):
        LoginJob(["no-such-host.invalid"])


def test_a_secret_of_standard_input_has_a_least_length(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"short\n")
    os.close(writing)
    with os.fdopen(reading) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert command.main(["serve", "--address", "tcp://127.0.0.5:0", "--secret-stdin"]) == 1
    assert "first line of standard input" in capsys.readouterr().err
