"""Stores of SPMD jobs: the ranks of a real torchrun, and what is refused before anybody is asked."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from skipper import torchstore as ts
from skipper.control import serve_job

REPOSITORY = Path(__file__).parents[3]


def torchrun(tmp_path: Path, ranks: int, scenario: str) -> tuple[int, list[str], str]:
    """Exit code, the sorted lines (without gloo's) and the standard error of ``spmd_ranks SCENARIO`` on so many ranks.

    Each rank writes its lines into a file of its own: gloo writes to standard output in pieces before PyTorch 2.9.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    logs = tmp_path / "logs"
    process = subprocess.Popen(
        [*command, "--log-dir", str(logs), "--redirects", "1", "-m", "tests.torchstore.spmd_ranks", scenario],
        cwd=REPOSITORY,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, err = process.communicate(timeout=110)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    lines = [line for log in logs.glob("**/stdout.log") for line in log.read_text(encoding="utf-8").splitlines()]
    return process.returncode, sorted(line for line in lines if not line.startswith("[Gloo]")), err


def test_every_rank_of_a_torchrun_uses_the_stores_that_they_have_initialized(tmp_path: Path) -> None:
    code, lines, err = torchrun(tmp_path, 2, "everything")
    assert (code, lines) == (0, ["done 0", "done 1"]), err
    assert os.listdir(tmp_path / "skipper") == ["actors.secret"]  # the user's; no connection file is left


def test_ranks_that_die_give_the_others_typed_errors(tmp_path: Path) -> None:
    code, lines, err = torchrun(tmp_path, 3, "deaths")
    assert lines == ["rank 0 PublisherLostError", "rank 2 PublisherLostError", "rank 2 SupervisionError True"], err
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
