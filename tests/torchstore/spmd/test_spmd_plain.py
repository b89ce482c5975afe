"""Stores of ranks that nobody has launched but a loop: processes with four variables, and no torch.distributed."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skipper.control.cluster.hosts import command as host_command
from tests.torchstore import store_ranks
from tests.torchstore.store_ranks import DEATH

SCRIPT = store_ranks.__file__
PATIENCE_S = 200.0
"""For a dozen processes that import torch on a busy machine, some of them one after another."""
PLAIN = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1"}

pytestmark = pytest.mark.timeout(2 * PATIENCE_S)

Outcome = list[tuple[int, list[str], str]]
Start = Callable[..., Outcome]


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Start]:
    """Runs ranks to their end: the exit status, the lines and the errors of each."""
    started: list[subprocess.Popen[str]] = []
    around = {name: value for name, value in os.environ.items() if not name.startswith(("LOCAL_", "SLURM_", "OMPI_"))}

    def start(scenario: str, world_size: int = 2, **more: str) -> Outcome:
        for rank in range(world_size):
            own = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "XDG_RUNTIME_DIR": str(tmp_path)}
            process = subprocess.Popen(
                [sys.executable, SCRIPT, scenario],
                env={**around, **PLAIN, **own, **more},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            started.append(process)
        outcome = []
        for process in started[-world_size:]:
            out, err = process.communicate(timeout=PATIENCE_S)
            outcome.append((process.returncode, out.splitlines(), err))
        return outcome

    yield start
    for process in started:
        with process:  # closes its pipes
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def test_a_store_may_be_initialized_again_and_not_twice_and_some_ranks_may_just_end(
    ranks: Start, tmp_path: Path
) -> None:
    for status, lines, err in ranks("life"):
        assert (status, lines) == (0, ["the end"]), err
    assert os.listdir(tmp_path / "skipper") == ["actors.secret"]  # the user's; no connection file is left


def test_ranks_without_an_event_loop_use_the_store_by_blocking_calls(ranks: Start) -> None:
    for status, lines, err in ranks("blocking"):
        assert (status, lines) == (0, ["the end"]), err


@pytest.mark.parametrize(("victim", "words"), [(1, "rank 1 has ended, process"), (0, "rank 0 is gone")])
def test_when_a_rank_dies_while_they_meet_the_others_are_told(ranks: Start, victim: int, words: str) -> None:
    outcome = ranks("die", 3, STORE_VICTIM=str(victim))
    for rank, (status, lines, err) in enumerate(outcome):
        if rank == victim:
            assert status == DEATH
        else:
            assert status == 0, err
            assert len(lines) == 1
            assert words in lines[0]


@pytest.fixture
def gate(tmp_path: Path) -> dict[str, str]:
    """What has ranks come as those of several hosts do."""
    secret = tmp_path / "secret"
    assert host_command.main(["secret", str(secret)]) == 0
    return {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.81", "SKIPPER_SECRET_FILE": str(secret)}


def test_ranks_with_a_secret_meet_by_tcp_and_bring_processes_for_volumes(ranks: Start, gate: dict[str, str]) -> None:
    for rank, (status, lines, err) in enumerate(ranks("use", STORE_STRATEGY="rank", **gate)):
        # They are on one host, whatever they have been told.
        assert (status, lines) == (0, [f"rank {rank} is {rank} of 2 on host 0"]), err


def test_a_world_that_is_no_multiple_of_its_local_part_meets_as_any_other(ranks: Start, gate: dict[str, str]) -> None:
    # As where one host has two ranks and another one has one.
    for rank, (status, lines, err) in enumerate(
        ranks("use", 3, STORE_STRATEGY="rank", **{**gate, "LOCAL_WORLD_SIZE": "2"})
    ):
        assert (status, lines) == (0, [f"rank {rank} is {rank} of 3 on host 0"]), err


def test_a_volume_outlives_its_rank_and_ends_with_the_last(ranks: Start, gate: dict[str, str]) -> None:
    # Processes for volumes share the pipes of the rank that has started them: that those end says that all have.
    first, second = ranks("lose", STORE_STRATEGY="rank", **gate)
    assert first[:2] == (-signal.SIGKILL, ["it is there"]), first[2]
    assert second[:2] == (-signal.SIGKILL, []), second[2]


def test_ranks_of_several_hosts_without_a_secret_are_told_what_to_pass(ranks: Start) -> None:
    # 192.0.2.1 is nobody's (RFC 5737).
    (outcome,) = ranks("use", 1, RANK="1", WORLD_SIZE="2", MASTER_ADDR="192.0.2.1")
    assert outcome[0] == 1
    assert "RendezvousError: rank 1 is not on the host of rank 0, 192.0.2.1" in outcome[2]
    assert "Pass certs= (or set SKIPPER_CERTS)" in outcome[2]
