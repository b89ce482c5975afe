"""Which requests are handed on when replicas die, and which replicas are replaced."""

import contextlib
import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skipper.control import ActorError, ProcMesh
from skipper.control.model import settings as bounds
from skipper.control.model.errors import ReplicaLostError
from skipper.control.services import ReplicaState, Service
from tests.control.conftest import PATIENCE_S, Failures, alive, wait_until
from tests.control.services.conftest import REPLICAS, Gate, outcome
from tests.control.services.parties import Batcher, Client, Door, KillsWhoOpensIt, Worker


def test_what_a_dead_replica_had_not_begun_is_handed_on_whatever_it_is(service: Service[Worker], gate: Gate) -> None:
    futures = [service.wait_for.route(gate.path) for _ in range(4 * REPLICAS)]
    victim = min(gate.wait(REPLICAS))
    wait_until(
        lambda: all(each.outstanding > 1 for each in service.metrics().get(PATIENCE_S)), "each replica has more to do"
    )
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: any(future.done() for future in futures), "one is refused")
    gate.open()
    values = [outcome(lambda future=future: future.get(PATIENCE_S)) for future in futures]  # type: ignore[misc]
    (refused,) = [value for value in values if not isinstance(value, int)]
    assert isinstance(refused, ReplicaLostError)
    assert not refused.is_unhandled
    assert victim not in values


def test_that_is_known_in_other_processes_too(
    service: Service[Worker], gate: Gate, own_procs: Callable[..., ProcMesh]
) -> None:
    client = own_procs().spawn("client", Client, service)
    values = client.wait_for.call_one(gate.path, 4 * REPLICAS)
    victim = min(gate.wait(REPLICAS))
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: not alive(victim), "the victim is dead")
    gate.open()
    errors = [value for value in values.get(PATIENCE_S) if not isinstance(value, int)]
    assert errors == ["ReplicaLostError"]


def test_requests_that_were_with_a_dead_replica_come_before_those_made_later(gate: Gate) -> None:
    service = Worker.options(num_replicas=1, stable_s=0.0).as_service(name="single")
    service.initialized.get(PATIENCE_S)
    first = service.wait_for.route(gate.path)
    (victim,) = gate.wait(1)
    notes = [service.note.route(str(number)) for number in range(50)]
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(ReplicaLostError):
        first.get(PATIENCE_S)
    later = service.note.route("later")
    assert later.get(PATIENCE_S) == [*(str(number) for number in range(50)), "later"]
    assert all(note.done() for note in notes)
    service.stop().get(PATIENCE_S)


def test_a_request_that_kills_whoever_opens_it_is_not_handed_on_for_ever(service: Service[Worker]) -> None:
    before = sum(each.restarts for each in service.metrics().get(PATIENCE_S))
    with pytest.raises(ReplicaLostError):
        service.note.route(KillsWhoOpensIt()).get(PATIENCE_S)  # type: ignore[arg-type]
    service.initialized.get(PATIENCE_S)
    assert sum(each.restarts for each in service.metrics().get(PATIENCE_S)) == before + 1 + 3


def test_requests_wait_for_the_first_replica_although_nobody_holds_their_service() -> None:
    request = Worker.options(num_replicas=1).as_service(name="dropped").double.route(4)
    everywhere = Worker.options(num_replicas=1).as_service(name="dropped, too").double.fanout(5)
    gc.collect()
    assert request.get(PATIENCE_S) == 8
    assert list(everywhere.get(PATIENCE_S)) == [10]


def test_endpoints_that_answer_several_requests_together_get_them_all() -> None:
    service = Batcher.options(num_replicas=1).as_service(200, name="batches")
    explicit = [service.collect.route(number) for number in range(200)]
    assert [future.get(PATIENCE_S) for future in explicit] == [200] * 200
    concurrent = [service.gather.route(number) for number in range(200)]
    assert [future.get(PATIENCE_S) for future in concurrent] == [200] * 200
    service.stop().get(PATIENCE_S)


def test_more_requests_than_may_wait_here_wait_at_the_replicas(
    service: Service[Worker], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = bounds.Settings(max_unhandled=256)
    monkeypatch.setattr(bounds, "_settings", changed)
    waiting = [service.wait_for.route(gate.path) for _ in range(REPLICAS)]
    gate.wait(REPLICAS)
    futures = [service.double.route(number) for number in range(10 * 1024)]
    gate.open()
    assert [future.get(PATIENCE_S) for future in futures] == [2 * number for number in range(10 * 1024)]
    assert len({future.get(PATIENCE_S) for future in waiting}) == REPLICAS


@pytest.fixture
def doors(tmp_path: Path) -> Iterator[tuple[Service[Door], Path]]:
    """Two replicas, and a file: as long as it is there those that start do not come up."""
    shut = tmp_path / "shut"
    service = Door.options(num_replicas=2, stable_s=60.0, max_restarts=0).as_service(str(shut), name="doors")
    service.initialized.get(PATIENCE_S)
    yield service, shut
    shut.unlink(missing_ok=True)
    with contextlib.suppress(ActorError):
        service.stop().get(PATIENCE_S)


def use(service: Service[Door]) -> list[int]:
    """Have every replica come to its second request."""
    service.pid.fanout().get(PATIENCE_S)
    return list(service.pid.fanout().get(PATIENCE_S))


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not alive(pid), "it is dead")


def is_back(service: Service[Door], number: int) -> bool:
    metrics = service.metrics().get(PATIENCE_S)[number]
    return metrics.restarts > 0 and metrics.state is ReplicaState.READY


def starting(shut: Path) -> set[int]:
    return {int(sign.suffix[1:]) for sign in shut.parent.glob(f"{shut.name}.*")}


def test_a_rolling_fanout_does_not_wait_for_one_replica_while_it_could_call_another(
    doors: tuple[Service[Door], Path], tmp_path: Path
) -> None:
    service, shut = doors
    first, second = use(service)
    shut.touch()
    kill(first)
    wait_until(lambda: bool(starting(shut)), "its successor starts")
    rolled = service.mark.fanout(str(tmp_path / "mark"), rolling=1)
    wait_until((tmp_path / f"mark.{second}").exists, "the other one is updated")
    assert not rolled.done()
    shut.unlink()
    assert list(rolled.get(PATIENCE_S))[1] == second


def test_a_replica_that_was_of_use_is_replaced_however_young_it_dies(doors: tuple[Service[Door], Path]) -> None:
    service, _ = doors
    for restarts in (1, 2):
        first, _ = use(service)
        kill(first)

        def has_restarted(number: int = restarts) -> bool:
            return service.metrics().get(PATIENCE_S)[0].restarts == number

        wait_until(has_restarted, "its death is known, and it is replaced")
        service.initialized.get(PATIENCE_S)


def test_a_replica_that_dies_while_others_come_up_is_replaced(doors: tuple[Service[Door], Path]) -> None:
    service, shut = doors
    first, second = use(service)
    shut.touch()
    kill(first)
    wait_until(lambda: bool(starting(shut)), "its successor starts")
    (successor,) = starting(shut)
    shut.rename(hidden := shut.with_name("hidden"))  # the next one comes up
    Path(f"{shut}.{successor}.held").touch()
    kill(second)
    wait_until(lambda: is_back(service, 1), "the other one is back")
    kill(successor)
    service.initialized.get(PATIENCE_S)
    assert [each.restarts for each in service.metrics().get(PATIENCE_S)] == [2, 1]
    hidden.unlink()


def test_a_replica_that_was_of_no_use_fails_its_service(doors: tuple[Service[Door], Path], failures: Failures) -> None:
    service, shut = doors
    use(service)
    shut.touch()
    kill(use(service)[0])
    wait_until(lambda: bool(starting(shut)), "its successor starts")
    kill(starting(shut).pop())
    assert failures.wait().mesh_name == "doors"
