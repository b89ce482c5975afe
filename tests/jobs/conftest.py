"""What the tests of jobs share."""

import os
from collections.abc import Iterator

import pytest

from skipper import control
from skipper.control import HostMesh
from tests.control.conftest import (
    PATIENCE_S,
    failures,
    leave_nothing_behind,
    root_failures,
    script,
)
from tests.jobs.actors import Worker
from tests.jobs.slurm_cluster import SlurmCluster, missing_program, slurm_cluster

__all__ = ["failures", "leave_nothing_behind", "root_failures", "script"]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A Slurm cluster of three nodes."""
    if (program := missing_program()) is not None:
        pytest.skip(f"{program} of Slurm is not installed: make test-packages")
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), nodes=3) as cluster:
        before = os.environ.get("SLURM_CONF")
        os.environ["SLURM_CONF"] = str(cluster.config)
        try:
            yield cluster
        finally:
            os.environ.pop("SLURM_CONF")
            if before is not None:
                os.environ["SLURM_CONF"] = before


@pytest.fixture
def afresh() -> Iterator[None]:
    """A script of its own for the test: what it attaches is attached by nobody before."""
    control.shutdown()
    yield
    control.shutdown()


def greeted(hosts: HostMesh) -> list[int]:
    """The ranks that a worker on each host answers with."""
    procs = hosts.spawn_procs()
    ranks = list(procs.spawn("workers", Worker).rank.call().get(PATIENCE_S))
    procs.stop().get(PATIENCE_S)
    return ranks
