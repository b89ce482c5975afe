"""A store of ranks on several machines: by a secret and by certificates, its volumes beside the ranks of each."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skipper.control.cluster.hosts.certs import issue, make_authority
from tests.control.conftest import PATIENCE_S
from tests.hosts.conftest import QUIET, environment, wait_for_nothing
from tests.hosts.netns import Network
from tests.torchstore import store_ranks

SCRIPT = store_ranks.__file__
PORT = "29400"
TORCH_S = 120.0
"""For programs that import torch on a busy machine."""

Started = list[subprocess.Popen[str]]


@pytest.fixture(autouse=True)
def cleared(net: Network) -> Iterator[None]:
    yield
    for machine in net.machines:
        machine.clear()


def start(net: Network, scenario: str, per_machine: int, *per_rank: dict[str, str], **more: str) -> Started:
    """So many ranks on each of two machines, with what a launcher sets."""
    started = []
    for rank in range(2 * per_machine):
        machine = net.machines[rank // per_machine]
        own = per_rank[rank // per_machine] if per_rank else {}
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(2 * per_machine),
            "LOCAL_WORLD_SIZE": str(per_machine),
            "MASTER_ADDR": net.machines[0].address,
            "MASTER_PORT": PORT,
            "OMP_NUM_THREADS": "1",
        }
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        env = {**environment(), **QUIET, **variables, **own, **more}
        started.append(machine.start([sys.executable, SCRIPT, scenario], env=env, **pipes))
    return started


def outcome(started: Started) -> list[str]:
    """What ranks that are to succeed have said."""
    said = []
    for process in started:
        out, err = process.communicate(timeout=TORCH_S)
        assert process.returncode == 0, err
        said += out.splitlines()
    return said


def test_ranks_of_two_machines_with_a_secret_read_what_each_has_put(net: Network, secret_file: Path) -> None:
    trust = {"SKIPPER_SECRET_FILE": str(secret_file), "STORE_INSECURE": "1", "STORE_STRATEGY": "rank"}
    said = outcome(start(net, "use", 2, **trust))
    assert said == [f"rank {rank} is {rank % 2} of 2 on host {rank // 2}" for rank in range(4)]
    for machine in net.machines[:2]:
        wait_for_nothing(machine)


def test_ranks_of_two_machines_with_certificates_read_what_each_has_put(net: Network, tmp_path: Path) -> None:
    make_authority(tmp_path / "ca")
    folders = []
    for machine, role in zip(net.machines[:2], ("script", "host"), strict=True):
        folders.append({"SKIPPER_CERTS": str(tmp_path / machine.name)})
        issue(tmp_path / "ca", tmp_path / machine.name, [machine.address], role=role)
    said = outcome(start(net, "use", 1, *folders, STORE_DATA_PLANE="1", STORE_STRATEGY="host"))
    assert said == ["rank 0 is 0 of 1 on host 0", "rank 1 is 0 of 1 on host 1"]


def test_a_rank_of_another_machine_learns_of_the_death_of_rank_0_at_once(net: Network, secret_file: Path) -> None:
    trust = {"SKIPPER_SECRET_FILE": str(secret_file), "STORE_INSECURE": "1", "STORE_VICTIM": "0"}
    _, second = start(net, "die", 1, **trust)
    out, err = second.communicate(timeout=TORCH_S)
    assert "rank 0 is gone" in out, err
    for machine in net.machines[:2]:
        wait_for_nothing(machine)


def test_a_rank_without_the_secret_is_told_what_to_pass(net: Network, secret_file: Path) -> None:
    _, second = start(net, "use", 1, {"SKIPPER_SECRET_FILE": str(secret_file), "STORE_INSECURE": "1"}, {})
    _, err = second.communicate(timeout=TORCH_S)
    assert second.wait(PATIENCE_S) == 1
    assert "ranks of several hosts need a common secret" in err
