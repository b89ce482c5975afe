"""The ranks of `torchrun` as the processes of one job: with the real one, and as other launchers set its variables."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skipper.control import this_proc
from skipper.control.cluster.jobs import SpmdJob
from skipper.control.cluster.jobs.rank_registry import extent_of
from skipper.control.cluster.jobs.spmd import PORT, TorchrunRank
from skipper.control.model.errors import AlreadyInJobError, InsecureHostError, TorchrunError
from tests.control.conftest import PATIENCE_S, wait_until
from tests.hosts.netns import REPOSITORY, SKIPPER
from tests.integration.example_process import run
from tests.jobs import torchrun_script
from tests.jobs.torchrun_script import DEATH

SCRIPT = torchrun_script.__file__
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
TORCH_S = 90.0
"""For programs that import torch on a busy machine."""

RANK_0 = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}

Start = Callable[..., list[subprocess.Popen[str]]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts two ranks with what `torchrun` sets, and without torch."""
    started: list[subprocess.Popen[str]] = []

    def start(what: str, secret: str = "", timeout: float = PATIENCE_S, ranks: int = 2, **more: str) -> list:
        for rank in range(ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "XDG_RUNTIME_DIR": str(tmp_path)}
            command = [sys.executable, SCRIPT, what, secret, str(timeout)]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            started.append(subprocess.Popen(command, env={**os.environ, **RANK_0, **own, **more}, **pipes))
        return started[-ranks:]

    yield start
    for process in started:
        with process:
            process.kill()


def answers(host: str, port: int) -> bool:
    """Whether somebody listens there."""
    with socket.socket() as knock:
        return knock.connect_ex((host, port)) == 0


def outcome(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """How it ended, and what it wrote."""
    out, err = process.communicate(timeout=2 * PATIENCE_S)
    return process.returncode, out, err


def test_the_script_runs_on_rank_0_and_steers_all_ranks_which_end_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    example = run(*TORCHRUN, "--log-dir", str(tmp_path / "logs"), SCRIPT, "work", "", timeout=TORCH_S)
    assert example.process.returncode == 0, example.stderr
    places = [("0", "0"), ("1", "0")]
    expected = ["{'hosts': 1, 'gpus': 2}", *[str(places)] * 3, str([1 << 20] * 2), str([3.0] * 2), "the end"]
    assert example.stdout.splitlines() == expected
    assert [file.name for file in (tmp_path / "skipper").iterdir()] == ["actors.secret"]  # the user's stays


def test_torchrun_starts_a_new_job_when_a_rank_has_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    options = ("--max-restarts", "1", "--monitor-interval", "0.5", "--log-dir", str(tmp_path / "logs"))
    example = run(*TORCHRUN, *options, SCRIPT, "lose_once", "", timeout=TORCH_S)
    assert example.process.returncode == 0, example.stderr
    rounds = re.findall(r"round (\d) (\w+)", example.stdout)
    assert [number for number, _ in rounds] == ["0", "1"]
    assert rounds[0][1] != rounds[1][1]
    assert example.stdout.count("the end") == 1
    assert re.search(rf"failed \(exitcode: {DEATH}\) local_rank: 1", example.stderr)  # and not rank 0, which follows


def test_rank_0_says_at_once_that_a_rank_has_ended_the_job(start: Start) -> None:
    first, second = map(outcome, start("lose_once"))
    assert second[0] == DEATH
    assert first[0] == 1
    assert first[1].splitlines()[1:] == []
    assert "rank 0 ends the job: ranks cannot answer die: process rank 1 is gone" in first[2]


def test_ranks_put_and_get_what_is_in_a_store_on_them(start: Start) -> None:
    first, second = map(outcome, start("store"))
    assert first[:2] == (0, f"{[sum(range(1 << 18))] * 2}\nthe end\n"), first[2]
    assert second[:2] == (0, ""), second[2]


def test_a_rank_that_dies_is_a_failure_of_the_meshes_on_it(start: Start) -> None:
    first, second = map(outcome, start("lose"))
    assert second[0] == DEATH
    assert sorted(first[1].splitlines()) == ["('0', '0')", "the end", "told of FailureKind.PROCESS 1"], first[2]


@pytest.mark.parametrize(
    ("what", "status", "words"), [("fail", 1, "rank 0 fails so"), ("leave", 3, ""), ("die", 9, "")]
)
def test_when_rank_0_fails_the_others_leave_with_status_1(start: Start, what: str, status: int, words: str) -> None:
    first, second = map(outcome, start(what))
    assert (first[0], first[1]) == (status, "")
    assert words in first[2]
    assert (second[0], second[1]) == (1, "")
    assert "rank 1 ends" in second[2]


def test_the_script_may_let_the_others_leave_and_go_on(start: Start) -> None:
    first, second = map(outcome, start("stop"))
    assert first[:2] == (0, "stopped\nthe end\n"), first[2]
    assert second[:2] == (0, ""), second[2]


def test_the_ranks_are_together_once(start: Start) -> None:
    first, second = map(outcome, start("enter_again"))
    assert first[0] == 1
    assert "TorchrunError: the ranks left when the with statement ended" in first[2]
    assert second[0] == 0


def test_rank_0_names_the_ranks_that_do_not_come(start: Start) -> None:
    (alone,) = start("work", timeout=0.5, ranks=1)
    status, _, err = outcome(alone)
    assert status == 1
    assert "RendezvousError: ranks [1] of 2 have not joined the job within 0.5 s" in err


def test_what_a_killed_run_has_left_does_not_confuse_the_next(start: Start, tmp_path: Path) -> None:
    (alone,) = start("stop", ranks=1)
    stale = tmp_path / "skipper" / f"{TorchrunRank.of(RANK_0).name}.json"
    wait_until(stale.exists, "rank 0 waits for the others")
    alone.kill()
    alone.wait(PATIENCE_S)
    assert stale.exists()
    first, second = map(outcome, start("stop"))
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert not stale.exists()


def test_a_rank_that_is_too_early_waits_and_one_without_rank_0_says_so(start: Start) -> None:
    first, second = start("stop", timeout=2.0, RANK="1", LOCAL_RANK="1")
    for process in (first, second):
        status, _, err = outcome(process)
        assert status == 1
        assert "RendezvousError: rank 0 could not be reached within 2 s" in err


@pytest.fixture
def secret(tmp_path: Path) -> str:
    path = tmp_path / "secret"
    subprocess.run([*SKIPPER, "host", "secret", str(path)], check=True, cwd=REPOSITORY, timeout=PATIENCE_S)
    return str(path)


def test_ranks_of_several_nodes_meet_by_tcp_and_a_secret(start: Start, secret: str) -> None:
    nodes = {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.77"}
    first, second = map(outcome, start("lose", secret, **nodes))
    assert second[0] == DEATH, second[2]
    assert sorted(first[1].splitlines()) == ["('0', '0')", "the end", "told of FailureKind.PROCESS 1"], first[2]


def test_ranks_of_several_nodes_meet_by_tls(start: Start, tmp_path: Path) -> None:
    certs = [*SKIPPER, "certs"]
    for command in (
        [*certs, "init", "ca"],
        [*certs, "issue", "ca", "node", "--role", "script", "--host", "127.0.0.79", "--host", "127.0.0.1"],
    ):
        subprocess.run(
            command, check=True, cwd=tmp_path, timeout=PATIENCE_S, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}
        )
    nodes = {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.79"}
    first, second = map(outcome, start("stop", str(tmp_path / "node"), **nodes))
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]


@pytest.mark.parametrize(
    ("changed", "words"),
    [({"MASTER_PORT": "1"}, "rank 0 of another run listens there"), ({}, "AuthenticationError: .* has another secret")],
)
def test_who_does_not_belong_to_the_run_is_not_let_in(
    start: Start, secret: str, tmp_path: Path, changed: dict[str, str], words: str
) -> None:
    nodes = {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.78"}
    if not changed:
        other = tmp_path / "other"
        other.write_text("x" * 32)
        other.chmod(0o600)
    start("stop", secret, ranks=1, **nodes)
    wait_until(lambda: answers("127.0.0.78", PORT), "rank 0 listens")
    (stranger,) = start("stop", secret if changed else str(other), 3.0, 1, **nodes, RANK="1", **changed)
    status, _, err = outcome(stranger)
    assert status == 1
    assert re.search(words, err), err


def test_several_nodes_need_a_secret_and_tls_or_trust(monkeypatch: pytest.MonkeyPatch, secret: str) -> None:
    for name, value in {**RANK_0, "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "192.0.2.1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="pass secret_file="):
        SpmdJob()
    with pytest.raises(InsecureHostError, match=r"192\.0\.2\.1 is on a network"):
        SpmdJob(secret_file=secret)
    with pytest.raises(ValueError, match="an address is tcp://HOST:PORT"):
        SpmdJob(address="somewhere", secret_file=secret)


def test_who_is_no_rank_of_torchrun_is_told_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in RANK_0:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(TorchrunError, match="RANK is not set: start the script with torchrun"):
        SpmdJob()
    with pytest.raises(TorchrunError, match="WORLD_SIZE is a number under torchrun, not 'two'"):
        TorchrunRank.of({**RANK_0, "WORLD_SIZE": "two"})
    with pytest.raises(TorchrunError, match="do not fit together"):
        TorchrunRank.of({**RANK_0, "RANK": "2"})
    for name, value in RANK_0.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TorchrunError, match="inside the with statement"):
        SpmdJob().procs()


def test_a_rank_that_has_begun_a_job_of_its_own_cannot_come(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**RANK_0, "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    this_proc()
    with pytest.raises(AlreadyInJobError, match="enter the SpmdJob before"), SpmdJob():
        pass


def test_ranks_of_a_restart_and_of_another_run_have_another_name() -> None:
    names = {
        TorchrunRank.of({**RANK_0, **more}).name
        for more in ({}, {"TORCHELASTIC_RESTART_COUNT": "1"}, {"TORCHELASTIC_RUN_ID": "x"}, {"MASTER_PORT": "1"})
    }
    assert len(names) == 4
    assert TorchrunRank.of({**RANK_0, "RANK": "1", "LOCAL_RANK": "1"}).name in names


def test_ranks_lie_along_hosts_and_gpus_where_nodes_are_alike() -> None:
    assert dict(extent_of([2, 2, 2, 2])) == {"hosts": 2, "gpus": 2}
    assert dict(extent_of([2, 2, 4, 4, 4, 4])) == {"ranks": 6}
