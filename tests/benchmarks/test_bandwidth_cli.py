"""``skipper bw`` as a user runs it: programs started from a shell, their output and exit codes."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.bandwidth.command import main
from benchmarks.report import Report

ROOT = Path(__file__).resolve().parents[2]
BW = [sys.executable, "-m", "benchmarks.bandwidth"]
SKIPPER = [sys.executable, "-m", "benchmarks.cli"]
TOKEN = "the-token-of-this-test"
QUICK = ["-n", "4", "-w", "1"]
LIMIT_S = 40

Start = Callable[..., subprocess.Popen[str]]


def environment(token: str | None) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key != "SKIPPER_BW_TOKEN"}
    return kept if token is None else {**kept, "SKIPPER_BW_TOKEN": token}


def bw(*argv: str, token: str | None = None, program: list[str] = BW) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*program, *argv], cwd=ROOT, env=environment(token), capture_output=True, text=True, timeout=LIMIT_S
    )


def rows(report: str) -> list[dict[str, Any]]:
    """The rows of a report that has the documented shape."""
    Report.from_json(report)
    return list(json.loads(report)["results"])


@pytest.fixture
def start() -> Iterator[Start]:
    """Start programs, and see to it that none outlives the test."""
    started: list[subprocess.Popen[str]] = []

    def begin(*argv: str, token: str | None = TOKEN, stderr: int = subprocess.PIPE) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*BW, *argv],
            cwd=ROOT,
            env=environment(token),
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=LIMIT_S)


class Terminal:
    """A terminal for standard error: on one, a client says when each row is there."""

    def __init__(self) -> None:
        self.ours, self.theirs = os.openpty()
        self.said = ""

    def wait_for(self, word: str) -> None:
        while word not in self.said:
            self.said += os.read(self.ours, 4096).decode()

    def rest(self) -> str:
        """Everything that was said, once the program has ended."""
        self._hang_up()
        with contextlib.suppress(OSError):  # EIO is how a terminal says that nobody is left
            while more := os.read(self.ours, 4096):
                self.said += more.decode()
        return self.said

    def close(self) -> None:
        self._hang_up()
        os.close(self.ours)

    def _hang_up(self) -> None:
        if self.theirs >= 0:
            os.close(self.theirs)
            self.theirs = -1


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    with contextlib.closing(Terminal()) as opened:
        yield opened


def printed_command(server: subprocess.Popen[str]) -> tuple[str, str, list[str]]:
    """Token, address and flags of the client command that a server prints."""
    assert server.stdout is not None
    for line in server.stdout:
        found = re.match(r"\s+SKIPPER_BW_TOKEN=(\S+) .*?(127\.0\.0\.1:\d+)(.*)", line)
        if found:
            return found[1], found[2], found[3].split()
    raise AssertionError("the server printed no client command")


def heard(server: subprocess.Popen[str]) -> str:
    """The next line that a server logs."""
    assert server.stderr is not None
    return server.stderr.readline()


@pytest.mark.parametrize("op", ["read", "write"])
def test_local_prints_json_alone_with_the_documented_rows(op: str) -> None:
    done = bw("--local", "-s", "4K", "-s", "1M", "--op", op, *QUICK, "--check", "--json", "-")
    assert done.returncode == 0, done.stderr
    first_use, *sizes = rows(done.stdout)
    assert (first_use["name"], first_use["unit"], first_use["n"]) == ("first_use", "us", 1)
    assert first_use["value"] == pytest.approx(first_use["register_us"] + first_use["connect_us"])
    assert [row["nbytes"] for row in sizes] == [4096, 1 << 20]
    for row in sizes:
        assert (row["name"], row["unit"], row["n"]) == (f"{op}_bandwidth", "GB/s", 4)
        assert row["reference"]["name"] == "memcpy"
        assert row["verified"] is True
        assert row["backend"] == "shm"
    assert "ratio" in done.stderr, "the table goes to standard error"
    assert json.loads(done.stdout)["errors"] == []


@pytest.mark.parametrize(
    "flags",
    [
        ["--bidirectional"],
        ["--bidirectional", "--op", "write"],
        ["--batch", "5"],
        ["--batch", "5", "--op", "write", "--bidirectional"],
        ["--backend", "ucx"],
        ["--backend", "ucx", "--op", "write", "--batch", "3"],
        ["-D", "0.05"],
    ],
    ids=" ".join,
)
def test_every_way_of_transferring_is_verified(flags: list[str]) -> None:
    done = bw("--local", "-s", "100000", "-s", "64K", *QUICK, "--check", "--json", "-", *flags)
    assert done.returncode == 0, done.stderr
    own = [row for row in rows(done.stdout) if row.get("verified")]
    assert [row["size"] for row in own] == [100000, 65536]
    assert all(row["nbytes"] == row["batch"] * row["size"] for row in own)


def test_ucx_stands_beside_the_kernels_own_copy() -> None:
    done = bw("--local", "-s", "64K", *QUICK, "--backend", "ucx", "--json", "-")
    assert done.returncode == 0, done.stderr
    _, own, kernel = rows(done.stdout)
    assert (own["backend"], kernel["name"]) == ("ucx", "process_vm_readv_bandwidth")
    assert own["ratio_to_process_vm_readv"] == pytest.approx(own["value"] / kernel["value"])


def test_latency_rows_are_times() -> None:
    done = bw("--local", "--latency", "-s", "4K", *QUICK, "--json", "-")
    row = rows(done.stdout)[1]
    assert (row["name"], row["unit"], row["nbytes"]) == ("read_latency", "us", 4096)
    assert row["p50"] == row["p50_us"]


def test_the_table_shows_every_column_and_files_are_written(tmp_path: Path) -> None:
    names = {kind: tmp_path / f"rows.{kind}" for kind in ("json", "csv", "png")}
    out = ["--json", str(names["json"]), "--csv", str(names["csv"]), "--plot", str(names["png"])]
    done = bw("bw", "--local", "-s", "4K", "-s", "64K", *QUICK, *out, program=SKIPPER)
    assert done.returncode == 0, done.stderr
    for column in ("size", "iterations", "p50", "p99.9", "average", "peak", "Gb/s", "memcpy", "ratio"):
        assert column in done.stdout
    assert "first use: register" in done.stdout
    assert len(rows(names["json"].read_text())) == 3
    assert names["csv"].read_text().count("\n") == 4
    assert names["png"].stat().st_size > 1000


def test_a_rate_below_the_minimum_fails() -> None:
    flags = ["--local", "-s", "64K", *QUICK, "--json", "-", "--min-bw"]
    low = bw(*flags, "999999")
    assert low.returncode == 4
    assert "below --min-bw 999999 GB/s: 64K at" in low.stderr
    assert json.loads(low.stdout)["errors"]
    assert bw(*flags, "0.000001").returncode == 0


def test_lost_bytes_fail_the_check() -> None:
    # The same program, whose transfers report success and move nothing.
    program = """if True:
        import sys
        from benchmarks.bandwidth import command, side
        side.Side.mover = lambda self, size: lambda: None
        sys.exit(command.main(["--local", "-s", "64K", "-n", "2", "--check", "--json", "-"]))
    """
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 3
    assert "read of 64K: after the first transfer, byte 0 is" in done.stderr
    report = json.loads(done.stdout)
    assert report["errors"]
    assert [row["name"] for row in report["results"]] == ["first_use"]


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--local", "-s", "4X"], "'4X' is not a size"),
        (["--local", "--backend", "verbs"], "the verbs backend cannot be used here"),
        (["--local", "--mem", "cuda:99"], "needs a GPU"),
        (["--local", "-s", "1T", "--batch", "1000"], "GiB are free"),
        (["127.0.0.1"], "set SKIPPER_BW_TOKEN"),
        (["--local", "--plot", "no/such/folder.png"], "there is no folder"),
        (["--bind", "192.0.2.1"], "cannot listen on 192.0.2.1"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line_before_anything_starts(
    argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SKIPPER_BW_TOKEN", raising=False)
    children = psutil.Process().children()
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert psutil.Process().children() == children


def test_help_names_the_exit_codes() -> None:
    done = bw("--help")
    assert done.returncode == 0
    assert "exit codes" in done.stdout


def test_bad_input_exits_with_2_and_one_sentence() -> None:
    done = bw("--local", "-s", "4X")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("python -m benchmarks.bandwidth: argument -s/--size: '4X' is not a size")


def test_the_printed_client_command_works_for_one_client_after_another(start: Start) -> None:
    server = start("-p", "0", "-s", "64K", "--check", token=None)
    token, address, flags = printed_command(server)
    assert flags == ["-s", "64K", "--check"]
    for op in ("read", "write"):
        done = bw(address, *flags, *QUICK, "--op", op, "--json", "-", token=token)
        assert done.returncode == 0, done.stderr
        assert rows(done.stdout)[1]["verified"] is True
        assert "begins" in heard(server)
        assert "is done" in heard(server)
    os.killpg(server.pid, signal.SIGINT)
    assert server.wait(LIMIT_S) == 130


def test_a_wrong_token_is_refused_and_the_server_goes_on(start: Start) -> None:
    server = start("-p", "0")
    _, address, _ = printed_command(server)
    guess = bw(address, "-s", "4K", *QUICK, token="a guess")
    assert guess.returncode == 1
    assert "different tokens" in guess.stderr
    assert TOKEN not in guess.stderr
    assert "different tokens" in heard(server)
    assert bw(address, "-s", "4K", *QUICK, token=TOKEN).returncode == 0


def test_a_server_refuses_what_it_cannot_do_and_says_why(start: Start) -> None:
    # This client does not look before it asks, as one on a better equipped host would not have to.
    server = start("-p", "0")
    _, address, _ = printed_command(server)
    program = f"""if True:
        import sys
        from benchmarks.bandwidth import command
        command.require_feasible = command.configure = lambda *_: None
        sys.exit(command.main(["{address}", "-s", "4K", "--backend", "verbs"]))
    """
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment(TOKEN),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 1
    assert "the other side reports UsageError: the verbs backend cannot be used here" in done.stderr


@pytest.mark.parametrize("backend", ["shm", "ucx"])
def test_a_server_killed_midway_ends_the_client(start: Start, terminal: Terminal, backend: str) -> None:
    server = start("-p", "0")
    _, address, _ = printed_command(server)
    client = start(address, "-s", "1M", "-D", "300", "--backend", backend, "--json", "-", stderr=terminal.theirs)
    terminal.wait_for("first_use")
    owners = psutil.Process(server.pid).children()
    assert len(owners) == 1
    server.kill()
    out, _ = client.communicate(timeout=LIMIT_S)
    assert client.returncode == 1
    assert len(json.loads(out)["errors"]) == 1
    assert "Traceback" not in terminal.rest()
    gone, alive = psutil.wait_procs(owners, timeout=LIMIT_S)
    assert (len(gone), alive) == (1, [])


def test_an_interrupted_client_leaves_a_report_and_the_server_goes_on(start: Start, terminal: Terminal) -> None:
    server = start("-p", "0")
    _, address, _ = printed_command(server)
    client = start(address, "-s", "64K", "-D", "300", "--json", "-", stderr=terminal.theirs)
    terminal.wait_for("first_use")
    client.send_signal(signal.SIGINT)
    out, _ = client.communicate(timeout=LIMIT_S)
    assert client.returncode == 130
    assert "Traceback" not in terminal.rest()
    assert json.loads(out)["errors"] == ["interrupted"]
    assert "begins" in heard(server)
    assert "ended" in heard(server)
    assert "status 1" in heard(server)
    assert bw(address, "-s", "4K", *QUICK, token=TOKEN).returncode == 0


def test_an_interrupted_local_run_leaves_no_process(start: Start, terminal: Terminal) -> None:
    client = start("--local", "-s", "64K", "-D", "300", "--json", "-", stderr=terminal.theirs)
    terminal.wait_for("first_use")
    children = psutil.Process(client.pid).children()
    os.killpg(client.pid, signal.SIGINT)
    out, _ = client.communicate(timeout=LIMIT_S)
    assert client.returncode == 130
    assert "Traceback" not in terminal.rest()
    assert json.loads(out)["errors"] == ["interrupted"]
    assert len(children) == 1
    assert not children[0].is_running()


def test_a_killed_client_takes_its_local_server_along(start: Start, terminal: Terminal) -> None:
    client = start("--local", "-s", "64K", "-D", "300", stderr=terminal.theirs)
    terminal.wait_for("first_use")
    children = psutil.Process(client.pid).children()
    client.kill()
    gone, alive = psutil.wait_procs(children, timeout=LIMIT_S)
    assert (len(gone), alive) == (1, [])


def test_an_owner_that_dies_ends_a_local_run(start: Start, terminal: Terminal) -> None:
    client = start("--local", "-s", "64K", "-D", "300", "--json", "-", stderr=terminal.theirs)
    terminal.wait_for("first_use")
    psutil.Process(client.pid).children()[0].kill()
    out, _ = client.communicate(timeout=LIMIT_S)
    assert client.returncode == 1
    assert len(json.loads(out)["errors"]) == 1
