"""Actors of meshes under a name, called from beyond the job, and calls out of a mesh; two jobs with the same names."""

from collections.abc import Callable
from pathlib import Path

import pytest

from skipper.control import Actor, ActorError, ActorMesh, DeadlineError, ProcMesh, SupervisionError, endpoint, this_host
from skipper.control.model.errors import HandleExpiredError, NameNotFoundError, NoSuchMethodError
from skipper.control.rpc import ActorServer, MetadataMapping, MetadataResolver, MetadataServer, RpcClient, RpcOptions
from tests.control.conftest import Failures, Script, wait_until
from tests.control.rpc.conftest import client_of
from tests.control.rpc.parties import PATIENCE_S, Calculator, Host, NotCallable, Worker

Scripts = Callable[[str], Script]

PREAMBLE = """
import os
import time
os.environ["XDG_RUNTIME_DIR"] = {folder!r}
from skipper.control import *
from skipper.control.rpc import *
from tests.control.rpc.parties import Calculator, Worker

OPTIONS = RpcOptions(timeout=20)
"""


class Caller(Actor):
    """Calls a plain actor that lives outside of the job."""

    def __init__(self, url: str) -> None:
        from skipper.control.rpc import FixedResolver

        self.client = RpcClient(FixedResolver(url), Calculator, RpcOptions(PATIENCE_S), name="calculator")

    @endpoint
    async def add(self, left: int) -> int:
        return await self.client.add(left)  # type: ignore[no-any-return]

    @endpoint
    async def fail(self) -> None:
        await self.client.fail("out there")


@pytest.fixture(scope="module")
def procs() -> ProcMesh:
    return this_host().spawn_procs({"ranks": 2})


@pytest.fixture(scope="module")
def workers(procs: ProcMesh) -> ActorMesh[Worker]:
    return procs.spawn("workers", Worker)


def test_an_actor_of_a_mesh_is_called_under_its_name(server: ActorServer, workers: ActorMesh[Worker]) -> None:
    server.register("worker", workers.slice(ranks=1))
    client = client_of(server.address, Worker, "worker")
    assert client.add.sync(1, right=2) == client.add(1, 2).get(PATIENCE_S) == 3
    assert client.pid.sync() == workers.slice(ranks=1).pid.call_one().get(PATIENCE_S)
    with pytest.raises(ActorError, match="in a mesh") as raised:
        client.fail.sync()
    assert isinstance(raised.value.cause, NotCallable)
    assert "in fail" in raised.value.remote_traceback
    with pytest.raises(TypeError):
        client.add(1)
    with pytest.raises(DeadlineError):
        client.with_options(timeout=0.2).pause.sync(1.0)
    with pytest.raises(NoSuchMethodError):
        client_of(server.address, Calculator, "worker").echo.sync(1)
    server.unregister("worker")


def test_of_several_actors_the_answers_come_as_a_mesh_of_values(
    server: ActorServer, workers: ActorMesh[Worker]
) -> None:
    server.register("workers", workers)
    values = client_of(server.address, Worker, "workers").pid.sync()
    assert values == workers.pid.call().get(PATIENCE_S)
    assert dict(values.extent) == {"ranks": 2}
    server.unregister("workers")


def test_an_actor_of_a_mesh_calls_beyond_its_job(procs: ProcMesh, host: Callable[..., Host]) -> None:
    outside = host()
    caller = procs.spawn("caller", Caller, outside.url())
    assert caller.add.call(5).get(PATIENCE_S) == [7, 7]
    with pytest.raises(ActorError) as raised:
        caller.slice(ranks=0).fail.call_one().get(PATIENCE_S)
    assert isinstance(raised.value.cause, ActorError)
    assert raised.value.cause.summary.endswith("NotCallable: out there")
    assert "raise NotCallable(words)" in raised.value.cause.remote_traceback


@pytest.mark.parametrize("end", ["dies", "is stopped"])
def test_a_mesh_that_ends_loses_its_name(
    metadata: MetadataServer, workers: ActorMesh[Worker], failures: Failures, procs: ProcMesh, end: str
) -> None:
    resolver = MetadataResolver(metadata.address, namespace="job")
    with ActorServer("127.0.0.1", 0, MetadataMapping(metadata.address, namespace="job")) as server:
        own = this_host().spawn_procs() if end == "dies" else None
        mesh = (own or procs.slice(ranks=0)).spawn("doomed", Worker)
        server.register("worker", mesh)
        client = RpcClient(resolver, Worker, RpcOptions(PATIENCE_S), name="worker")
        pinned = RpcClient(client.pin(), Worker, RpcOptions(PATIENCE_S, retries=3))
        assert client.add.sync(1, 2) == 3
        if end == "dies":
            with pytest.raises(SupervisionError, match="die"):
                client.die.sync()
        else:
            mesh.stop().get(PATIENCE_S)
        wait_until(lambda: resolver.names() == {}, "the name is gone")
        with pytest.raises((HandleExpiredError, NameNotFoundError)):
            client.add.sync(1, 2)
        server.register("worker", workers.slice(ranks=1))
        assert client.add.sync(1, 2) == 3
        with pytest.raises(HandleExpiredError):
            pinned.add.sync(1, 2)
        if own is not None:
            failures.wait()
            own.stop().get(PATIENCE_S)


def test_two_jobs_with_the_same_names_hear_nothing_of_each_other(
    metadata: MetadataServer, script: Scripts, surroundings: Path, tmp_path: Path
) -> None:
    """Each of two scripts serves the same names, from its mesh and plain, and its own workers look them up."""
    job = (
        PREAMBLE.format(folder=str(surroundings))
        + """
class Asker(Actor):
    @endpoint
    def ask(self) -> tuple[str, int]:
        resolver = MetadataResolver()
        label = RpcClient(resolver, Calculator, OPTIONS, name="calculator").label.sync()
        return label, RpcClient(resolver, Worker, OPTIONS, name="trainer/0").pid.sync()

os.environ["SKIPPER_METADATA"] = {address!r}
server = ActorServer("127.0.0.1", 0, MetadataMapping()).start()
procs = this_host().spawn_procs()
trainer = procs.spawn("trainer", Worker)
server.register("trainer/0", trainer)
server.register("calculator", Calculator(namespace()))
server.register("/shared/" + {label!r}, Calculator({label!r}))
label, pid = procs.spawn("asker", Asker).ask.call_one().get(20)
print(label == namespace(), pid == trainer.pid.call_one().get(20), len(MetadataResolver().resolve("calculator")))
print(namespace(), flush=True)
while not os.path.exists({done!r}):
    time.sleep(0.005)
server.stop()
"""
    )
    done = tmp_path / "done"
    job = job.replace("{address!r}", repr(metadata.address)).replace("{done!r}", repr(str(done)))
    scripts = [script(job.replace("{label!r}", repr(f"job-{number}"))) for number in (1, 2)]
    namespaces = []
    for each in scripts:
        assert each.line() == "True True 1"
        namespaces.append(each.line())
    assert len(set(namespaces)) == 2
    own = MetadataResolver(metadata.address, namespace="none-of-theirs")
    with pytest.raises(NameNotFoundError):
        own.resolve("calculator")
    for number, name in enumerate(namespaces, 1):
        theirs = RpcClient(own, Calculator, RpcOptions(PATIENCE_S), name=f"/{name}/calculator")
        assert theirs.label.sync() == name  # across, by the absolute name
        shared = RpcClient(own, Calculator, RpcOptions(PATIENCE_S), name=f"/shared/job-{number}")
        assert shared.label.sync() == f"job-{number}"
    done.touch()
    for each in scripts:
        assert each.finish() == (0, "", "")
    assert own.names("/") == {}
