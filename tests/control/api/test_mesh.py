import asyncio
import os
import pickle
import signal
from collections.abc import Callable
from typing import Any

import pytest

from skipper.control import (
    Actor,
    ActorError,
    ActorMesh,
    PayloadError,
    ProcMesh,
    SupervisionError,
    context,
    endpoint,
    get_or_spawn_controller,
    this_host,
    this_proc,
)
from tests.control.actors import AsyncEcho, BadConstruction, Cleaner, Echo, Manager
from tests.control.conftest import PATIENCE_S, Failures


class Client(Actor):
    """Calls the server of its own rank, as the guide does."""

    def __init__(self, servers: ActorMesh[Echo]) -> None:
        self.server = servers.slice(**context().actor_instance.rank)

    @endpoint
    def fetch(self) -> tuple[int, Any]:
        return os.getpid(), self.server.pid.call_one().get(PATIENCE_S)


class Counter(Actor):
    def __init__(self, start: int) -> None:
        self.count = start

    @endpoint
    def add(self) -> tuple[int, int]:
        self.count += 1
        return self.count, os.getpid()


class Asker(Actor):
    @endpoint
    def ask(self) -> tuple[int, int]:
        return get_or_spawn_controller("counter", Counter, 100).get(PATIENCE_S).add.call_one().get(PATIENCE_S)


class FailsOnce(Actor):
    def __init__(self, path: str) -> None:
        if not os.path.exists(path):
            with open(path, "w", encoding="utf-8"):
                raise OSError("not yet")

    @endpoint
    def ok(self) -> bool:
        return True


def test_meshes_know_their_axes(procs: ProcMesh) -> None:
    mesh = procs.spawn("mesh", Echo)
    assert (mesh.extent, mesh.size, mesh.name) == ({"gpus": 2}, 2, "mesh")
    assert (procs.extent, procs.size) == ({"gpus": 2}, 2)
    assert repr(mesh) == "<ActorMesh mesh {'gpus': 2}>"
    assert mesh.slice(gpus=1).extent == {}
    with pytest.raises(KeyError):
        mesh.slice(hosts=0)
    with pytest.raises(IndexError):
        mesh.slice(gpus=2)
    mesh.stop().get(PATIENCE_S)


def test_message_rank_is_the_place_in_the_slice_and_rank_that_in_the_mesh(procs: ProcMesh) -> None:
    mesh = procs.split(gpus={"dp": 1, "tp": 2}).spawn("mesh", Echo)
    ((rank, message_rank, actor_id),) = mesh.slice(tp=slice(1, 2), dp=0).where.call().get(PATIENCE_S)
    assert rank == {"dp": 0, "tp": 1}
    assert message_rank == {"tp": 0}
    assert "mesh[1]" in actor_id
    assert mesh.flatten("rank").where.call().get(PATIENCE_S)[1][1] == {"rank": 1}
    assert mesh.rename(tp="model").where.call().get(PATIENCE_S)[1][1] == {"dp": 0, "model": 1}
    mesh.stop().get(PATIENCE_S)


def test_references_survive_pickling_and_compare(procs: ProcMesh) -> None:
    mesh = procs.spawn("mesh", Echo)
    again = pickle.loads(pickle.dumps(mesh.slice(gpus=1)))
    assert again == mesh.slice(gpus=1) != mesh
    assert hash(again) == hash(mesh.slice(gpus=1))
    assert again.pid.call_one().get(PATIENCE_S) == mesh.pid.call().get(PATIENCE_S)[1]
    assert pickle.loads(pickle.dumps(procs)) == procs
    mesh.stop().get(PATIENCE_S)


def test_references_passed_to_actors_work_there(procs: ProcMesh, own_procs: Callable[..., ProcMesh]) -> None:
    servers = procs.spawn("servers", Echo)
    clients = own_procs({"gpus": 2}).spawn("clients", Client, servers)
    fetched = clients.fetch.call().get(PATIENCE_S)
    assert [server for _, server in fetched] == servers.pid.call().get(PATIENCE_S)
    caller = procs.slice(gpus=0).spawn("caller", AsyncEcho)
    assert caller.call.call_one(servers.slice(gpus=1), "hi").get(PATIENCE_S) == "hi"
    servers.stop().get(PATIENCE_S)


def test_two_processes_that_dial_each_other_at_once_both_get_answers(own_procs: Callable[..., ProcMesh]) -> None:
    for _ in range(4):
        procs = own_procs({"gpus": 2})
        callers, echoes = procs.spawn("callers", AsyncEcho), procs.spawn("echoes", AsyncEcho)
        callers.initialized.get(PATIENCE_S)
        calls = [
            callers.slice(gpus=gpu).call.call_one(echoes.slice(gpus=1 - gpu), (gpu, number))
            for number in range(5)
            for gpu in range(2)
        ]
        assert [call.get(PATIENCE_S) for call in calls] == [(gpu, number) for number in range(5) for gpu in range(2)]


def test_actors_spawn_siblings_and_children(procs: ProcMesh) -> None:
    manager = procs.slice(gpus=0).spawn("manager", Manager)
    sibling = manager.sibling.call_one(Echo).get(PATIENCE_S)
    assert sibling.pid.call_one().get(PATIENCE_S) == procs.slice(gpus=0).spawn("e", Echo).pid.call_one().get(PATIENCE_S)
    leaves = manager.grow.call_one(2).get(PATIENCE_S)
    assert len(set(leaves.pid.call().get(PATIENCE_S))) == 2
    manager.stop().get(PATIENCE_S)
    with pytest.raises(SupervisionError):
        leaves.pid.call().get(PATIENCE_S)
    with pytest.raises(SupervisionError):
        sibling.pid.call_one().get(PATIENCE_S)


def test_this_proc_hosts_actors_that_run_beside_the_script() -> None:
    echo = this_proc().spawn("local", Echo)
    assert echo.pid.call_one().get(PATIENCE_S) == os.getpid()
    with pytest.raises(PayloadError):
        echo.echo.call_one(lambda: (yield)).get(PATIENCE_S) and echo.echo.call_one(n for n in ()).get(PATIENCE_S)
    value: list[int] = []
    assert echo.echo.call_one(value).get(PATIENCE_S) is not value  # state is never shared, not even here
    echo.stop().get(PATIENCE_S)


def test_stop_drains_what_was_sent_then_cleans_up_and_refuses_the_rest(procs: ProcMesh, tmp_path: Any) -> None:
    log = tmp_path / "log"
    cleaner = procs.slice(gpus=0).spawn("cleaner", Cleaner, str(log), "a")
    for number in range(20):
        cleaner.note.broadcast(f"note {number}")
    stopped = cleaner.stop()
    late = cleaner.note.call_one("late")
    stopped.get(PATIENCE_S)
    with pytest.raises(SupervisionError, match="stopped"):
        late.get(PATIENCE_S)
    assert log.read_text().splitlines() == [*(f"note {number}" for number in range(20)), "cleanup a NoneType"]
    cleaner.stop().get(PATIENCE_S)  # again


def test_owned_meshes_clean_up_before_their_owner(procs: ProcMesh, tmp_path: Any) -> None:
    log = tmp_path / "log"
    owner = procs.slice(gpus=0).spawn("owner", Cleaner, str(log), "owner")
    for name in ("first", "second"):
        owner.own.call_one(name).get(PATIENCE_S)
    owner.stop().get(PATIENCE_S)
    cleaned = [line.split()[1] for line in log.read_text().splitlines()]
    assert cleaned == ["second", "first", "owner"]


def test_a_cleanup_that_raises_is_the_error_of_the_stop(procs: ProcMesh, tmp_path: Any) -> None:
    cleaner = procs.slice(gpus=0).spawn("cleaner", Cleaner, str(tmp_path / "log"), "a", raises=True)
    with pytest.raises(SupervisionError, match="cleanup failed"):
        cleaner.stop().get(PATIENCE_S)


def test_slices_of_processes_are_not_stopped_by_themselves(procs: ProcMesh) -> None:
    with pytest.raises(ValueError, match="whole mesh"):
        procs.slice(gpus=0).stop()


def test_stopping_processes_is_no_failure_and_may_be_repeated() -> None:
    procs = this_host().spawn_procs()
    echo = procs.spawn("echo", Echo)
    pid = echo.pid.call_one().get(PATIENCE_S)
    procs.stop().get(PATIENCE_S)
    assert not os.path.exists(f"/proc/{pid}")
    procs.stop().get(PATIENCE_S)
    with pytest.raises(SupervisionError):
        echo.pid.call_one().get(PATIENCE_S)


def test_the_end_of_a_process_is_told_to_whoever_asks(own_procs: Callable[..., ProcMesh], failures: Failures) -> None:
    procs = own_procs({"gpus": 2})
    echoes = procs.spawn("echo", Echo)
    whole, other = procs.ended, procs.slice(gpus=0).ended
    os.kill(echoes.slice(gpus=1).pid.call_one().get(PATIENCE_S), signal.SIGKILL)
    whole.get(PATIENCE_S)
    procs.slice(gpus=1).ended.get(PATIENCE_S)  # of one that is dead already
    failures.wait()
    assert not other.done()
    procs.stop().get(PATIENCE_S)
    other.get(PATIENCE_S)


def test_processes_may_be_stopped_by_others_than_their_owner(procs: ProcMesh) -> None:
    manager = procs.slice(gpus=0).spawn("manager", Manager)
    leaves = manager.grow.call_one(2).get(PATIENCE_S)
    pids = leaves.pid.call().get(PATIENCE_S)
    manager.hand_over_procs.call_one().get(PATIENCE_S).stop().get(PATIENCE_S)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    assert manager.seen.call_one().get(PATIENCE_S) == []  # being stopped is no failure
    manager.stop().get(PATIENCE_S)


def test_a_controller_is_one_actor_for_the_whole_job(procs: ProcMesh) -> None:
    mine = get_or_spawn_controller("counter", Counter, 0).get(PATIENCE_S)
    assert mine.add.call_one().get(PATIENCE_S) == (1, os.getpid())
    askers = procs.spawn("askers", Asker)
    assert sorted(askers.ask.call().get(PATIENCE_S)) == [(2, os.getpid()), (3, os.getpid())]
    assert get_or_spawn_controller("counter", Counter, 0).get(PATIENCE_S) == mine


def test_a_controller_that_cannot_be_made_is_the_askers_error_and_may_be_tried_again(
    tmp_path: Any,
) -> None:
    path = str(tmp_path / "tried")
    with pytest.raises(ActorError, match="not yet") as caught:
        get_or_spawn_controller("fails once", FailsOnce, path).get(PATIENCE_S)
    assert isinstance(caught.value.cause, OSError)
    assert get_or_spawn_controller("fails once", FailsOnce, path).get(PATIENCE_S).ok.call_one().get(PATIENCE_S)


def test_initialized_ends_when_everything_is_up_or_in_the_first_error(procs: ProcMesh, failures: Failures) -> None:
    procs.initialized.get(PATIENCE_S)
    procs.spawn("echo", Echo).initialized.get(PATIENCE_S)
    with pytest.raises(SupervisionError, match="cannot be made"):
        procs.slice(gpus=0).spawn("bad", BadConstruction).initialized.get(PATIENCE_S)
    failures.wait()


def test_env_and_bootstrap_reach_the_processes(own_procs: Callable[..., ProcMesh]) -> None:
    procs = own_procs(env={"SKIPPER_TEST": "a"}, bootstrap=append_to_environment)
    echo = procs.spawn("echo", Echo)
    assert echo.run.call_one(os.getenv, "SKIPPER_TEST").get(PATIENCE_S) == "a and bootstrap"
    assert "SKIPPER_TEST" not in os.environ
    with pytest.raises(TypeError, match="environment"):
        this_host().spawn_procs(env={"A": 1})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="at least 1"):
        this_host().spawn_procs({"gpus": 0})


def append_to_environment() -> None:
    os.environ["SKIPPER_TEST"] += " and bootstrap"


async def append_later() -> None:
    await asyncio.sleep(0)
    os.environ["SKIPPER_TEST"] += " and later"


async def refuse_later() -> None:
    await asyncio.sleep(0)
    raise ValueError("told to refuse")


def test_an_async_bootstrap_runs_to_its_end(own_procs: Callable[..., ProcMesh]) -> None:
    procs = own_procs(env={"SKIPPER_TEST": "a"}, bootstrap=append_later)
    echo = procs.spawn("echo", Echo)
    assert echo.run.call_one(os.getenv, "SKIPPER_TEST").get(PATIENCE_S) == "a and later"


def test_an_async_bootstrap_that_raises_is_the_end_of_the_process(failures: Failures) -> None:
    echo = this_host().spawn_procs(bootstrap=refuse_later).spawn("echo", Echo)
    with pytest.raises(SupervisionError, match="bootstrap raised"):
        echo.pid.call_one().get(PATIENCE_S)
    failures.wait()


async def test_a_mesh_of_processes_ends_with_its_async_with_statement() -> None:
    assert await this_host().initialized
    async with this_host().spawn_procs() as procs:
        echo = procs.spawn("echo", Echo)
        with pytest.raises(ActorError, match="ValueError") as caught:
            await echo.fail.call_one(ValueError("told to"))
        assert isinstance(caught.value.exception, ValueError)
    with pytest.raises(SupervisionError):
        await echo.pid.call_one()
