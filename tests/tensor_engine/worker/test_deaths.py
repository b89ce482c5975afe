"""Workers that are killed while others communicate with them: whoever is left gets an error, and at once."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from skipper.control import MeshFailure, ProcMesh, SupervisionError, this_host
from skipper.tensor_engine import EngineClosedError, RemoteError, fetch_shard, inspect
from skipper.tensor_engine.errors import CommunicationError
from skipper.tensor_engine.script.issue import issue_call
from skipper.tensor_engine.script.session import session_of
from skipper.tensor_engine.shared.metadata import metadata
from skipper.tensor_engine.worker.groups import Group
from skipper.tensor_engine.worker.point_to_point import transfer
from tests.tensor_engine.conftest import Failures
from tests.tensor_engine.members import PATIENCE_S, members_of

LARGE = 100_003
"""Elements that go through shared memory."""


@pytest.fixture(scope="module")
def mortal(end_the_job: None) -> Iterator[ProcMesh]:
    """Four workers, of which each test kills the last that is left."""
    mesh = this_host().spawn_procs({"gpus": 4}, env={"OMP_NUM_THREADS": "1"})
    yield mesh
    mesh.stop().get(PATIENCE_S)


def wait_for(failures: list[MeshFailure], count: int) -> None:
    """Or one would come when nobody expects it any more."""
    began = time.monotonic()
    while len(failures) < count:
        assert time.monotonic() - began < PATIENCE_S
        time.sleep(0.005)


def test_a_worker_that_dies_is_a_failure_of_the_mesh_and_the_others_are_told_and_the_engine_ends(
    mortal: ProcMesh, procs: ProcMesh, failures: Failures
) -> None:
    with mortal.activate():
        x = torch.ones(LARGE) * (mortal.rank_tensor("gpus") + 1)
    with procs.activate():
        y = torch.ones(LARGE)
    assert inspect(x.reduce("gpus"), gpus=3, timeout=PATIENCE_S)[0] == 10
    instruction_stream, meta = x.remote_value.instruction_stream, x.remote_value.meta
    instruction_stream.session.synchronize(PATIENCE_S)
    (dying,) = issue_call(
        "tests.tensor_engine.on_workers:die",
        (x,),
        (meta,),
        instruction_stream=instruction_stream,
        mesh=mortal,
        static=3,
    )
    total = x.reduce("gpus")
    began = time.monotonic()
    coming = [fetch_shard(total, gpus=rank) for rank in range(3)]
    gone = fetch_shard(dying, gpus=3)
    for each in coming:
        with pytest.raises(RemoteError, match="failed on the group of workers"):
            each.get(PATIENCE_S)
    with pytest.raises(SupervisionError):
        gone.get(PATIENCE_S)
    assert time.monotonic() - began < 10
    wait_for(failures, 1)
    with pytest.raises((EngineClosedError, SupervisionError)):
        inspect(x + 1, gpus=3, timeout=PATIENCE_S)
    session_of(mortal).close(PATIENCE_S)
    assert inspect(y.reduce("gpus"), gpus=1, timeout=PATIENCE_S)[0] == 2  # other meshes go on


def meet(group: Group) -> None:
    transfer(group, torch.ones(()) if group.rank == 0 else None, metadata(()))


def read(group: Group) -> None:
    transfer(group, None, metadata(()))


def send_on(group: Group) -> None:
    for _ in range(20):  # a few go out before somebody has to take them
        transfer(group, torch.ones(LARGE), metadata((LARGE,)))


def die(group: Group) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def error_of(group: Group, function: Callable[[Group], None]) -> str:
    with pytest.raises(CommunicationError) as caught:
        function(group)
    return str(caught.value)


def test_a_killed_worker_is_an_error_for_those_that_read_from_it_or_send_to_it(
    mortal: ProcMesh, failures: Failures
) -> None:
    mesh = members_of(mortal.slice(gpus=slice(0, 3))).mesh
    workers = [mesh.slice(gpus=number) for number in range(3)]

    def start(number: int, function: Callable[..., Any], numbers: tuple[int, ...], *args: Any) -> Any:
        return workers[number].run.call_one(function, numbers, "main", args)

    for deaths, (work, numbers, victim) in enumerate(((read, (2, 0), 2), (send_on, (0, 1), 1)), start=1):
        for future in [start(number, meet, numbers) for number in numbers]:
            future.get(PATIENCE_S)
        began = time.monotonic()
        start(victim, die, numbers)
        assert "failed on the group of workers" in start(0, error_of, numbers, work).get(PATIENCE_S)
        assert time.monotonic() - began < 10
        wait_for(failures, deaths)
