"""Replicas of several processes, their setup, GPUs, health, and services that are made in vain."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from skipper.control import Actor, ActorDefinitionError, ActorError, ProcMesh, endpoint
from skipper.control.services import ReplicaState
from skipper.control.services.gpus import GpuLedger, visible_gpus
from tests.control.conftest import PATIENCE_S, Failures, alive, wait_until
from tests.control.services.parties import Fragile, Member, Noter, Ward, Worker


def test_a_replica_of_several_processes_is_set_up_and_answers_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    service = Member.options(procs=2, num_replicas=2, with_gpus=True, setup="meet").as_service(name="members")
    sums = service.sum.route().get(PATIENCE_S)
    assert sums.extent == {"procs": 2}
    assert sums == [3, 0]
    service.initialized.get(PATIENCE_S)
    gpus = [list(each) for each in service.gpus.fanout().get(PATIENCE_S)]
    assert sorted(gpus) == [["4,5", "4,5"], ["6,7", "6,7"]]
    first = service.own.fanout(rolling=1).get(PATIENCE_S)
    assert [list(each) for each in first] == [[1, 2], [1, 2]]
    service.scale(1).get(PATIENCE_S)
    service.scale(2).get(PATIENCE_S)  # with the GPUs that were given back
    assert [list(each) for each in service.gpus.fanout().get(PATIENCE_S)] == gpus
    service.stop().get(PATIENCE_S)


def test_all_processes_of_a_replica_handle_requests_in_the_same_order(own_procs: Callable[..., ProcMesh]) -> None:
    service = Member.options(procs=2).as_service(name="orderly")
    noters = own_procs({"noters": 2}).spawn("noters", Noter)
    counts = [noters.slice(noters=rank).send.call_one(service, f"{rank}/", 200) for rank in range(2)]
    mine = [service.note.route(f"me/{number}") for number in range(200)]
    service.note.fanout("rolled", rolling=1).get(PATIENCE_S)
    assert [count.get(PATIENCE_S) for count in counts] == [200, 200]
    for future in mine:
        future.get(PATIENCE_S)
    first, second = service.read.route().get(PATIENCE_S)
    assert len(first) == 601
    assert [pair for pair in zip(first, second, strict=True) if pair[0] != pair[1]] == []
    with pytest.raises(ActorError, match="ValueError: no good"):
        service.fail.route("no good").get(PATIENCE_S)
    service.stop().get(PATIENCE_S)


def test_what_peers_of_the_dead_raise_is_not_taken_for_an_answer(tmp_path: Path) -> None:
    service = Member.options(procs=2, stable_s=0.0).as_service(name="fragile")
    answers = service.break_off.route(str(tmp_path / "broken")).get(PATIENCE_S)
    assert len(set(answers)) == 2
    assert service.metrics().get(PATIENCE_S)[0].restarts == 1
    service.stop().get(PATIENCE_S)


def test_a_replica_dies_as_a_whole(tmp_path: Path) -> None:
    service = Worker.options(procs=2, num_replicas=1, stable_s=0.0).as_service(name="pairs")
    (before,) = service.pid.fanout().get(PATIENCE_S)
    os.kill(before[1], signal.SIGKILL)
    wait_until(lambda: not alive(before[0]), "its peer is ended, too")
    assert not set(service.pid.route().get(PATIENCE_S)) & set(before)
    service.stop().get(PATIENCE_S)


def test_a_service_that_finds_too_few_gpus_fails_and_says_how_many(
    failures: Failures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    Worker.options(procs=8, with_gpus=True).as_service()
    assert "needs 8 GPUs" in failures.wait().message


def test_gpus_are_those_that_the_environment_names_or_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "null"):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus(tmp_path) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1a, 3")
    assert visible_gpus(tmp_path) == ["GPU-1a", "3"]
    ledger = GpuLedger(["0", "1", "2"])
    assert ledger.take(2) == ["0", "1"]
    with pytest.raises(LookupError, match="needs 2 GPUs, one for each of its processes; 1 of the 3"):
        ledger.take(2)
    ledger.give_back(["0", "1"])
    assert sorted(ledger.take(3)) == ["0", "1", "2"]


def test_an_unwell_replica_gets_nothing_until_it_is_well_again_and_is_replaced_if_it_stays_so(tmp_path: Path) -> None:
    sick = tmp_path / "sick"
    options = {"health": "check", "health_interval_s": 0.2, "health_timeout_s": 5.0}
    service = Ward.options(num_replicas=2, **options).as_service(str(sick), name="wards")
    first, second = service.pid.fanout().get(PATIENCE_S)
    sign = Path(f"{sick}.{second}")
    sign.touch()
    states = {state: lambda state=state: metrics()[1].state is state for state in ReplicaState}

    def metrics() -> list:  # type: ignore[type-arg]
        return service.metrics().get(PATIENCE_S)

    wait_until(states[ReplicaState.UNHEALTHY], "it is found unwell")
    assert {service.pid.route().get(PATIENCE_S) for _ in range(4)} == {first}
    wait_until(lambda: metrics()[1].restarts == 1, "it is replaced")
    wait_until(lambda: not alive(second), "it is ended")
    service.initialized.get(PATIENCE_S)
    assert service.pid.fanout().get(PATIENCE_S)[0] == first
    service.stop().get(PATIENCE_S)


def test_a_replica_that_hangs_is_replaced_and_its_requests_are_handed_on(tmp_path: Path) -> None:
    options = {"health": "check", "health_interval_s": 0.1, "health_timeout_s": 0.3}
    service = Ward.options(num_replicas=1, **options).as_service(str(tmp_path / "sick"), name="hanging")
    before = service.pid.route().get(PATIENCE_S)
    service.hang.route()
    assert service.pid.route().get(PATIENCE_S) != before
    service.stop().get(PATIENCE_S)


class Clash(Actor):
    @endpoint
    def metrics(self) -> None:
        """A name that services use."""


@pytest.mark.parametrize(
    ("start", "error", "words"),
    [
        (lambda: Worker.options(replicas=2), TypeError, "replicas"),
        (lambda: Worker.options(num_replicas=0), ValueError, "num_replicas must be at least 1"),
        (lambda: Worker.options(procs=1.5), TypeError, "procs is a whole number"),
        (lambda: Worker.options(stable_s=float("nan")), ValueError, "stable_s is a number of seconds"),
        (lambda: Worker.options(health_interval_s=0.0), ValueError, "health_interval_s must be above 0"),
        (lambda: Worker.options().as_service(1, 2), TypeError, "too many positional"),
        (lambda: Worker.options(health="double").as_service(), ActorDefinitionError, "missing 1 required"),
        (lambda: Worker.options(health="nothing").as_service(), ActorDefinitionError, "no endpoint of that name"),
        (lambda: Worker.options(setup="pid").as_service(), ActorDefinitionError, "takes 0 positional"),
        (lambda: Clash.options().as_service(), ActorDefinitionError, "Clash.metrics"),
    ],
)
def test_what_cannot_be_a_service_is_refused_at_once(start: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        start()  # type: ignore[operator]


def test_a_replica_that_cannot_be_set_up_fails_its_service(failures: Failures) -> None:
    Worker.options(setup="fail", max_restarts=1, backoff_s=0.0).as_service(name="unset")
    assert "cannot be set up" in failures.wait().message


def test_a_service_of_an_actor_that_cannot_be_made_ends_its_owner_s_wait(failures: Failures) -> None:
    service = Fragile.options(max_restarts=0).as_service()
    assert failures.wait().mesh_name == "Fragile"
    assert repr(service) == "<service Fragile>"
