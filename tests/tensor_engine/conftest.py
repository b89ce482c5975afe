"""Meshes of workers that all tests of this folder share: importing torch takes each of them a second or two."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from skipper import control, tensor_engine
from skipper.control import ProcMesh, this_host
from skipper.tensor_engine.script.session import session_of
from tests.control.conftest import Failures, failures, root_failures
from tests.preloading import preloading

__all__ = ["Failures", "failures", "root_failures"]

PATIENCE_S = 60.0
"""Bound on waits that take milliseconds where nothing is wrong; starting a worker takes seconds."""


@pytest.fixture(scope="package", autouse=True)
def end_the_job() -> Iterator[None]:
    with preloading("torch", "skipper.tensor_engine"):  # examples run with this, too
        yield
        tensor_engine.shutdown()
        control.shutdown()


@pytest.fixture(scope="package")
def procs(end_the_job: None) -> ProcMesh:
    """Two workers along the axis ``gpus``."""
    return this_host().spawn_procs({"gpus": 2}, env={"OMP_NUM_THREADS": "1"})


@pytest.fixture(scope="package")
def four(end_the_job: None) -> ProcMesh:
    """Four workers: two along ``dp``, two along ``tp``."""
    return this_host().spawn_procs({"dp": 2, "tp": 2}, env={"OMP_NUM_THREADS": "1"})


@pytest.fixture
def active(procs: ProcMesh) -> Iterator[ProcMesh]:
    """The same two, active during the test."""
    with procs.activate():
        yield procs


def values_on(procs: ProcMesh) -> int:
    """How many values the first worker of a mesh has, once it has run what was issued so far."""
    return _told_by_the_first(procs, "count")


def bytes_on(procs: ProcMesh) -> int:
    """How many bytes of memory the values of the first worker take, once it has run what was issued so far."""
    return _told_by_the_first(procs, "stored")


def _told_by_the_first(procs: ProcMesh, function: str) -> int:
    gc.collect()
    session = session_of(procs)
    session.synchronize(PATIENCE_S)
    with session.lock:
        session.flush()
    answer = session.workers(tensor_engine.script.instruction_stream.MAIN).slice(**dict.fromkeys(procs.extent, 0))
    told: int = answer.ask.call_one(f"tests.tensor_engine.on_workers:{function}", 0, None).get(PATIENCE_S)
    return told


@pytest.fixture
def same_as_locally(procs: ProcMesh) -> Callable[[Callable[[], Any]], None]:
    """Runs a function in the script, and on the workers, and compares the tensors that it returns on each rank."""

    def check(program: Callable[[], Any]) -> None:
        local = _listed(program())
        with procs.activate():
            there = _listed(program())
        assert len(local) == len(there)
        for index, (here, remote) in enumerate(zip(local, there, strict=True)):
            assert isinstance(remote, tensor_engine.Tensor), f"result {index} has not left the script"
            assert remote.shape == here.shape
            assert remote.dtype == here.dtype
            assert remote.stride() == here.stride()
            assert remote.storage_offset() == here.storage_offset()
            for rank in range(procs.size):
                found = tensor_engine.inspect(remote, gpus=rank, timeout=PATIENCE_S)
                torch.testing.assert_close(found, here.detach(), equal_nan=True)

    return check


def _listed(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)
