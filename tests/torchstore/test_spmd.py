"""Stores of SPMD jobs: the ranks of a real torchrun, and what is refused before anybody is asked."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchstore as ts
from control import RemoteHostError, serve_job
from torchstore.spmd import _Board

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def torchrun(tmp_path: Path, ranks: int, scenario: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of ``spmd_ranks SCENARIO`` on so many ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    process = subprocess.Popen(
        [*command, "--log-dir", str(tmp_path / "logs"), "-m", "tests.torchstore.spmd_ranks", scenario],
        cwd=REPOSITORY,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=110)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, out, err


def test_every_rank_of_a_torchrun_uses_the_stores_that_they_have_initialized(tmp_path: Path) -> None:
    code, out, err = torchrun(tmp_path, 2, "everything")
    assert (code, sorted(out.splitlines())) == (0, ["done 0", "done 1"]), err
    assert os.listdir(tmp_path / "skipper") == ["actors.secret"]  # the user's; no connection file is left


def test_ranks_that_die_give_the_others_typed_errors(tmp_path: Path) -> None:
    code, out, err = torchrun(tmp_path, 3, "deaths")
    expected = ["rank 0 PublisherLostError", "rank 2 PublisherLostError", "rank 2 SupervisionError True"]
    assert sorted(out.splitlines()) == expected, err
    assert code != 0


READER = """
import asyncio, signal, sys
import control
import torchstore as ts
from torchstore.messages import Selector

async def read():
    control.join(sys.argv[1])
    grant = await (await ts.client())._remote.acquire("policy", Selector(), (), 20.0)
    print("reads", grant.version, flush=True)
    signal.pause()

asyncio.run(read())
"""


async def test_the_lease_of_a_joined_process_ends_with_it(
    store: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    await ts.put_state_dict({"w": ts.share_memory_(torch.nn.Linear(8, 8)).weight}, "policy", mode="direct")
    with serve_job() as served:
        command = [sys.executable, "-c", READER, str(served.path)]
        reader = await asyncio.create_subprocess_exec(*command, cwd=REPOSITORY, stdout=subprocess.PIPE)
        try:
            assert reader.stdout is not None
            assert await reader.stdout.readline() == b"reads 1\n"
            with pytest.raises(ts.StoreTimeoutError, match=f"read by process {reader.pid}"):
                await ts.wait_for_readers("policy", timeout=0.05)
        finally:
            reader.kill()
        await ts.fence("policy", timeout=20)
        await reader.wait()


def test_what_one_rank_fails_in_is_told_to_the_others_and_who_is_missing_is_named() -> None:
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    board = _Board(store, time.monotonic() + 0.2)
    board.tell("rank 0", "")
    with pytest.raises(ts.StoreTimeoutError, match="rank 1, rank 2 did not come"):
        board.hear_all(["rank 0", "rank 1", "rank 2"])
    board.fail("rank 1", ts.VolumeLostError("v", "it died"))
    with pytest.raises(ts.RendezvousError, match=r"rank 1 failed: VolumeLostError: .*it died"):
        board.hear_all(["rank 0", "rank 1"])
    board.fail("rank 0", ts.StrategyError("no"))
    with pytest.raises(ts.RendezvousError, match="rank 0 failed: StrategyError: no"):
        board.hear("the job of rank 0")


def test_nobody_at_the_meeting_point_is_a_time_out() -> None:
    env = ts.SPMDEnv(1, 1, 2, 2, "127.0.0.1", 1)
    with pytest.raises((ts.StoreTimeoutError, ts.RendezvousError), match="rank 1 could not reach the other ranks"):
        _Board.open(env, "prefix", time.monotonic() + 0.3)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.mark.usefixtures("environment")
def test_the_environment_says_which_rank_this_is() -> None:
    env = ts.SPMDEnv.from_env()
    assert env == ts.SPMDEnv(3, 1, 4, 2, "127.0.0.1", 29500)
    assert (env.num_hosts, env.group_rank) == (2, 1)


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_a_missing_variable_is_named(environment: pytest.MonkeyPatch, name: str) -> None:
    environment.delenv(name)
    with pytest.raises(ts.RendezvousError, match=f"with {name} set"):
        ts.SPMDEnv.from_env()


@pytest.mark.parametrize(
    ("name", "value"), [("RANK", "two"), ("RANK", "4"), ("LOCAL_WORLD_SIZE", "3"), ("LOCAL_WORLD_SIZE", "0")]
)
def test_variables_that_make_no_sense_are_refused(environment: pytest.MonkeyPatch, name: str, value: str) -> None:
    environment.setenv(name, value)
    with pytest.raises(ts.RendezvousError):
        ts.SPMDEnv.from_env()


def test_where_the_ranks_meet_may_be_said_by_the_caller(environment: pytest.MonkeyPatch) -> None:
    environment.delenv("MASTER_ADDR")
    environment.delenv("MASTER_PORT")
    env = ts.SPMDEnv.from_env(master_addr="localhost", master_port=1)
    assert (env.master_addr, env.master_port) == ("localhost", 1)


@pytest.mark.parametrize("strategy", [None, ts.ControllerStorageVolumes(), ts.SingletonStrategy()])
async def test_a_strategy_with_a_volume_per_rank_or_host_has_to_be_named(
    strategy: ts.TorchStoreStrategy | None,
) -> None:
    with pytest.raises(ts.StrategyError, match="initialize_spmd needs"):
        await ts.initialize_spmd(strategy)


@pytest.mark.usefixtures("environment")
async def test_ranks_on_several_hosts_are_not_there_yet() -> None:
    with pytest.raises(RemoteHostError, match="4 ranks on 2 hosts"):
        await ts.initialize_spmd(ts.HostStrategy())
