"""Stores of SPMD jobs: the ranks of a real torchrun, and what is refused before anybody is asked."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from skipper import torchstore as ts
from skipper.control import serve_job

REPOSITORY = Path(__file__).parents[3]

_OF_GLOO = re.compile(
    r"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. Expected number of connected peer ranks is : \d+\n?"
)


def torchrun(tmp_path: Path, ranks: int, scenario: str) -> tuple[int, str, str]:
    """Exit code, standard output (without gloo's) and standard error of ``spmd_ranks SCENARIO`` on so many ranks."""
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
    # Before PyTorch 2.9 gloo tells there who is connected, also in the middle of what another rank says.
    lines = [line for line in _OF_GLOO.sub("\n", out).splitlines(keepends=True) if line.strip()]
    return process.returncode, "".join(lines), err


def test_every_rank_of_a_torchrun_uses_the_stores_that_they_have_initialized(tmp_path: Path) -> None:
    code, out, err = torchrun(tmp_path, 2, "everything")
    assert (code, sorted(out.splitlines())) == (0, ["done 0", "done 1"]), err
    assert os.listdir(tmp_path / "skipper") == ["actors.secret"]  # the user's; no connection file is left


def test_ranks_that_die_give_the_others_typed_errors(tmp_path: Path) -> None:
    code, out, err = torchrun(tmp_path, 3, "deaths")
    expected = ["rank 0 PublisherLostError", "rank 2 PublisherLostError", "rank 2 SupervisionError True"]
    assert sorted(out.splitlines()) == expected, err
    assert code != 0


READER = Path(__file__).with_name("reader_script.py")


async def test_the_lease_of_a_joined_process_ends_with_it(
    store: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    await ts.put_state_dict({"w": ts.share_memory_(torch.nn.Linear(8, 8)).weight}, "policy", mode="direct")
    with serve_job() as served:
        command = [sys.executable, str(READER), str(served.path)]
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


@pytest.mark.parametrize("strategy", [None, ts.ControllerStorageVolumes(), ts.SingletonStrategy()])
async def test_a_strategy_with_a_volume_per_rank_or_host_has_to_be_named(
    strategy: ts.TorchStoreStrategy | None,
) -> None:
    with pytest.raises(ts.StrategyError, match="initialize_spmd needs"):
        await ts.initialize_spmd(strategy)
