"""Stores of ranks that real launchers have started: mpirun, `torch.multiprocessing.spawn`, srun, Ray."""

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.hosts.netns import REPOSITORY
from tests.jobs.slurm_cluster import SlurmCluster
from tests.torchstore import store_ranks

SCRIPT = store_ranks.__file__
PATIENCE_S = 120.0
BOTH = [f"rank {rank} is {rank} of 2 on host 0" for rank in range(2)]

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def port() -> int:
    """For MASTER_PORT, where nobody listens: it is a name that ranks have in common."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def lines(command: Sequence[str], tmp_path: Path) -> list[str]:
    """What a program that is to succeed says, sorted."""
    own = {"XDG_RUNTIME_DIR": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(
        command,
        env={**os.environ, **own},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, err
    return sorted(out.splitlines())


def test_ranks_of_mpirun_need_no_address(tmp_path: Path) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun of Open MPI is not installed: make test-packages")
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, SCRIPT, "use"]
    assert lines(command, tmp_path) == BOTH


def test_ranks_of_multiprocessing_need_an_address_and_a_port(tmp_path: Path, port: int) -> None:
    assert lines([sys.executable, SCRIPT, "spawn", str(port)], tmp_path) == BOTH


def test_ranks_of_srun_on_two_nodes_of_one_machine_need_nothing(slurm: SlurmCluster, tmp_path: Path) -> None:
    command = ["srun", "--nodes=2", "--ntasks-per-node=1", "--chdir", str(tmp_path), sys.executable, SCRIPT, "use"]
    assert lines(command, tmp_path) == BOTH


def test_actors_of_ray_are_ranks_by_what_they_are_told(tmp_path_factory: pytest.TempPathFactory, port: int) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed: pip install skipper-mesh[ray]")
    assert lines([sys.executable, SCRIPT, "ray", str(port)], tmp_path_factory.mktemp("r")) == BOTH
