"""Recovery where an engine places the hosts: in place first, and on another host when that one is lost."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from skipper import control
from skipper.control import ActorMesh, this_proc
from skipper.control.cluster.jobs import LocalJob
from skipper.control.cluster.jobs.local import LocalEngine
from skipper.control.cluster.recovery import RecoveryPolicy, ReplaceHost, Restart
from skipper.control.model.settings import adopt, settings
from tests.control.cluster.recovery.owners import Owner
from tests.control.conftest import PATIENCE_S, Failures, alive, wait_until
from tests.jobs.actors import Worker
from tests.jobs.test_job import agents


@pytest.fixture
def job() -> Iterator[LocalJob]:
    """Two hosts, the second of which is the one that something happens to."""
    with LocalJob(2) as job:
        job.hosts(timeout=PATIENCE_S)
        yield job


def owner_on_the_second_host(job: LocalJob) -> ActorMesh[Any]:
    policy = RecoveryPolicy(
        process=Restart(attempts=2, within_s=60.0, backoff_s=0.01),
        host=ReplaceHost(job, timeout_s=PATIENCE_S, backoff_s=0.1),
    )
    owner: ActorMesh[Any] = this_proc().spawn("owner", Owner, policy, job.hosts().slice(hosts=slice(1, 2)))
    owner.pids.call_one().get(PATIENCE_S)
    return owner


def test_a_process_that_dies_is_restarted_on_its_host_and_the_engine_is_not_asked(job: LocalJob) -> None:
    owner, before = owner_on_the_second_host(job), agents(job)
    first = owner.pids.call_one().get(PATIENCE_S)
    os.kill(first[0], signal.SIGKILL)
    second = owner.pids.call_one(1).get(PATIENCE_S)
    assert not set(first) & set(second)
    assert agents(job) == before
    assert owner.history.call_one().get(PATIENCE_S)[0] == [0, 1]
    owner.stop().get(PATIENCE_S)


def test_a_frozen_process_on_another_host_is_killed_when_it_is_condemned(job: LocalJob) -> None:
    owner = owner_on_the_second_host(job)
    first = owner.pids.call_one().get(PATIENCE_S)
    os.kill(first[1], signal.SIGSTOP)
    assert owner.condemn.call_one().get(PATIENCE_S)
    assert len(owner.pids.call_one(1).get(PATIENCE_S)) == 2
    wait_until(lambda: not any(map(alive, first)), "the frozen process has ended")
    owner.stop().get(PATIENCE_S)


def test_a_lost_host_is_replaced_by_the_engine(job: LocalJob) -> None:
    owner, before = owner_on_the_second_host(job), agents(job)
    first = owner.pids.call_one().get(PATIENCE_S)
    os.kill(before[1], signal.SIGKILL)
    second = owner.pids.call_one(1).get(PATIENCE_S)
    assert len(second) == 2
    after = agents(job)
    assert after[0] == before[0]
    assert after[1] != before[1]
    wait_until(lambda: not any(map(alive, first)), "what was on the lost host has ended")
    owner.stop().get(PATIENCE_S)


def test_an_owner_fails_when_its_engine_gives_no_other_host(
    job: LocalJob, failures: Failures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalEngine, "is_elastic", False)
    owner_on_the_second_host(job)
    os.kill(agents(job)[1], signal.SIGKILL)
    wait_until(lambda: any(failure.mesh_name == "owner" for failure in failures), "the owner has failed")
    told = next(failure for failure in failures if failure.mesh_name == "owner")
    assert "its engine cannot replace it" in told.report()
    assert "SIGKILL" in told.report()


def test_processes_on_attached_hosts_find_imported_what_is_to_be_preloaded(
    afresh: None,
) -> None:
    before = settings()
    control.configure(preload=["decimal"])
    try:
        with LocalJob(1) as job:
            worker = job.hosts(timeout=PATIENCE_S).spawn_procs().spawn("worker", Worker)
            assert "fork-server" in worker.started_by.call().get(PATIENCE_S)[0]
    finally:
        adopt(before)
