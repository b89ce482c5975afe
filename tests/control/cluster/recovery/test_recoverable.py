"""Processes that their owner makes anew: real ones, which are killed, frozen and broken."""

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from skipper import control
from skipper.control import ActorMesh, FailureKind, SupervisionError, this_proc
from skipper.control.cluster.recovery import RecoveryPolicy, ReplaceHost, Restart
from skipper.control.model.settings import adopt, settings
from tests.control.cluster.recovery.owners import Owner
from tests.control.cluster.recovery.test_policy import Engine
from tests.control.conftest import PATIENCE_S, Failures, alive, wait_until

QUICK = RecoveryPolicy(process=Restart(attempts=3, within_s=60.0, backoff_s=0.01))


@pytest.fixture
def owner() -> Iterator[ActorMesh[Any]]:
    owner = this_proc().spawn("owner", Owner, QUICK)
    yield owner
    owner.stop().get(PATIENCE_S)


@pytest.fixture
def nobody_else_kills() -> Iterator[None]:
    """Bounds so long that neither a heartbeat nor a stop that takes too long ends a process within the test."""
    before = settings()
    control.shutdown()
    control.configure(heartbeat_s=10 * PATIENCE_S, stop_timeout_s=10 * PATIENCE_S)
    yield
    control.shutdown()
    adopt(before)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_life_of_which_a_process_dies_is_followed_by_a_whole_new_one(
    owner: ActorMesh[Any], number: signal.Signals
) -> None:
    first = owner.pids.call_one().get(PATIENCE_S)
    os.kill(first[1], number)
    second = owner.pids.call_one(1).get(PATIENCE_S)
    assert not set(first) & set(second)
    wait_until(lambda: not any(map(alive, first)), "the other process of the first life has ended, too")
    made, failures = owner.history.call_one().get(PATIENCE_S)
    assert made == [0, 1]
    assert failures == ["crew"]


def test_a_frozen_process_that_its_owner_condemns_is_killed_and_replaced(nobody_else_kills: None) -> None:
    owner: ActorMesh[Any] = this_proc().spawn("owner", Owner, QUICK)
    first = owner.pids.call_one().get(PATIENCE_S)
    os.kill(first[0], signal.SIGSTOP)
    assert owner.condemn.call_one().get(PATIENCE_S)
    second = owner.pids.call_one(1).get(PATIENCE_S)
    wait_until(lambda: not any(map(alive, first)), "the frozen process has ended")
    assert all(map(alive, second))
    owner.stop().get(PATIENCE_S)


def test_a_life_that_dies_while_it_comes_up_is_replaced(owner: ActorMesh[Any]) -> None:
    owner.pids.call_one().get(PATIENCE_S)
    for _ in range(2):  # the second time whatever the first one has begun is in the middle of its start
        assert owner.condemn.call_one().get(PATIENCE_S)
        wait_until(lambda: owner.actors.call_one().get(PATIENCE_S) is not None, "the next life is begun")
    assert len(owner.pids.call_one(2).get(PATIENCE_S)) == 2
    assert owner.history.call_one().get(PATIENCE_S)[0] == [0, 1, 2]


def test_an_owner_fails_when_its_policy_is_used_up(failures: Failures) -> None:
    owner: ActorMesh[Any] = this_proc().spawn("owner", Owner, RecoveryPolicy(process=Restart(attempts=1)))
    os.kill(owner.pids.call_one().get(PATIENCE_S)[0], signal.SIGKILL)
    last = owner.pids.call_one(1).get(PATIENCE_S)
    os.kill(last[0], signal.SIGKILL)
    failure = failures.wait()
    assert failure.mesh_name == "owner"
    assert failure.root_cause().mesh_name == "crew.1"
    assert "SIGKILL" in failure.report()
    wait_until(lambda: not any(map(alive, last)), "what it owned has ended")


def test_actors_that_cannot_be_constructed_fail_their_owner_at_once(failures: Failures) -> None:
    owner: ActorMesh[Any] = this_proc().spawn("owner", Owner, QUICK, is_bad=True)
    failure = failures.wait()
    assert failure.mesh_name == "owner"
    assert failure.root_cause().kind is FailureKind.CONSTRUCTION
    with pytest.raises(SupervisionError):
        owner.history.call_one().get(PATIENCE_S)


def test_the_end_of_it_leaves_no_process_and_brings_no_further_life(owner: ActorMesh[Any]) -> None:
    pids = owner.pids.call_one().get(PATIENCE_S)
    owner.end.call_one().get(PATIENCE_S)
    wait_until(lambda: not any(map(alive, pids)), "its processes have ended")
    assert owner.condemn.call_one().get(PATIENCE_S)
    assert owner.actors.call_one().get(PATIENCE_S) is None
    assert owner.history.call_one().get(PATIENCE_S)[0] == [0]


def test_a_policy_that_has_a_job_stays_in_the_process_of_the_job() -> None:
    engine = Engine()
    packed = pickle.dumps(RecoveryPolicy(host=ReplaceHost(engine, timeout_s=5.0)))
    here = pickle.loads(packed)
    assert here.host.job is engine
    elsewhere = "import pickle, sys; pickle.loads(sys.stdin.buffer.read())"
    told = subprocess.run([sys.executable, "-c", elsewhere], input=packed, capture_output=True, check=False)
    assert told.returncode == 1
    assert b"only the process of the job can ask it" in told.stderr
