"""Ranks of `torchrun` on several machines as the processes of one job."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.control.conftest import PATIENCE_S
from tests.hosts.conftest import QUIET, environment
from tests.hosts.netns import Network
from tests.jobs import torchrun_script
from tests.jobs.torchrun_script import DEATH

SCRIPT = Path(torchrun_script.__file__)
PORT = 29400
TORCH_S = 90.0
"""For programs that import torch on a busy machine."""

Started = list[subprocess.Popen[str]]


@pytest.fixture(autouse=True)
def cleared(net: Network) -> Iterator[None]:
    yield
    for machine in net.machines:
        machine.clear()


def start(net: Network, what: str, secret_file: Path) -> Started:
    """One rank on each of two machines, with what `torchrun` sets, and without torch."""
    started = []
    for rank, machine in enumerate(net.machines[:2]):
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "GROUP_RANK": str(rank),
            "MASTER_ADDR": net.machines[0].address,
            "MASTER_PORT": str(PORT),
        }
        command = [sys.executable, str(SCRIPT), what, str(secret_file)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(machine.start(command, env={**environment(), **QUIET, **variables}, **pipes))
    return started


def test_the_ranks_of_torchrun_on_two_machines_are_one_mesh(net: Network, secret_file: Path, tmp_path: Path) -> None:
    started = []
    for number, machine in enumerate(net.machines[:2]):
        meet = ["--master-addr", net.machines[0].address, "--master-port", str(PORT)]
        nodes = ["--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "2", "--log-dir", str(tmp_path)]
        command = [sys.executable, "-m", "torch.distributed.run", *nodes, *meet, str(SCRIPT), "work", str(secret_file)]
        options = {"env": {**environment(), "OMP_NUM_THREADS": "1"}, "stdout": subprocess.PIPE}
        started.append(machine.start(command, **options))
    first, second = (process.communicate(timeout=TORCH_S)[0] for process in started)
    places = [("0", "0"), ("1", "0"), ("2", "1"), ("3", "1")]
    assert first.splitlines() == [
        "{'hosts': 2, 'gpus': 2}",
        *[str(places)] * 3,
        str([1 << 20] * 4),
        str([10.0] * 4),
        "the end",
    ]
    assert second == ""
    assert [process.returncode for process in started] == [0, 0]


def test_ranks_on_two_machines_put_and_get_what_is_in_a_store_on_them(net: Network, secret_file: Path) -> None:
    first, second = start(net, "store", secret_file)
    out, err = first.communicate(timeout=TORCH_S)
    assert out == f"{[sum(range(1 << 18))] * 2}\nthe end\n", err
    assert (first.returncode, second.wait(PATIENCE_S)) == (0, 0)


def test_a_rank_that_dies_on_another_machine_is_a_failure_of_the_meshes_on_it(net: Network, secret_file: Path) -> None:
    first, second = start(net, "lose", secret_file)
    assert second.wait(PATIENCE_S) == DEATH
    out, err = first.communicate(timeout=PATIENCE_S)
    assert sorted(out.splitlines()) == ["('0', '0')", "the end", "told of FailureKind.PROCESS 1"], err
    assert first.returncode == 0


def test_ranks_on_other_machines_leave_with_status_1_when_rank_0_dies(net: Network, secret_file: Path) -> None:
    first, second = start(net, "die", secret_file)
    out, err = second.communicate(timeout=PATIENCE_S)
    assert (out, second.returncode) == ("", 1)
    assert "rank 1 ends because rank 0 is gone" in err
    assert first.wait(PATIENCE_S) == DEATH
