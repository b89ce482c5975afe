"""``skipper bw`` as a user runs it: programs started from a shell, their output and exit codes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from skipper.benchmarks.bandwidth.command import main
from tests.benchmarks.programs import (
    LIMIT_S,
    QUICK,
    ROOT,
    SKIPPER,
    TOKEN,
    Start,
    Terminal,
    bw,
    environment,
    heard,
    printed_command,
    rows,
)


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


def test_the_table_shows_every_column_and_files_are_written(tmp_path: Path) -> None:
    names = {kind: tmp_path / f"rows.{kind}" for kind in ("json", "csv", "png")}
    out = ["--json", str(names["json"]), "--csv", str(names["csv"]), "--plot", str(names["png"])]
    done = bw("bw", "--local", "-s", "4K", "-s", "64K", *QUICK, *out, program=SKIPPER)
    assert done.returncode == 0, done.stderr
    for column in ("size", "p50", "p99.9", "average", "peak", "Gb/s", "memcpy", "ratio"):
        assert column in done.stdout
    assert "first use: register" in done.stdout
    assert "checked:" not in done.stdout
    assert len(rows(names["json"].read_text())) == 3
    assert names["csv"].read_text().count("\n") == 4
    assert names["png"].stat().st_size > 1000


def test_the_ratio_stands_between_the_two_medians_that_it_compares() -> None:
    done = bw("--local", "-s", "64K", *QUICK, "--check")
    cells = next(line for line in done.stdout.splitlines() if line.split()[:1] == ["64K"]).split()
    own, ratio, memcpy = map(float, cells[5:8])
    assert ratio == pytest.approx(own / memcpy, rel=0.01)
    assert "checked: the data was compared at both ends" in done.stdout


def test_a_row_is_in_the_pipe_as_soon_as_it_is_there_and_ctrl_c_leaves_the_rows(start: Start) -> None:
    client = start("--local", "-s", "4K", "-D", "300")
    assert client.stdout is not None
    seen = [client.stdout.readline()]
    while "first use" not in seen[-1]:
        seen.append(client.stdout.readline())
    os.killpg(client.pid, signal.SIGINT)
    out, err = client.communicate(timeout=LIMIT_S)
    assert (client.returncode, err.splitlines()[-1]) == (130, "python -m skipper.benchmarks.bandwidth: interrupted")
    assert "first use: register" in out


def test_a_run_ends_when_nobody_reads_its_rows(start: Start) -> None:
    client = start("--local", "-s", "4K", "-s", "8K", "-D", "1")
    assert client.stdout is not None
    assert "memory" in client.stdout.readline()
    client.stdout.close()
    assert client.stderr is not None
    assert "the reader of the rows has closed the pipe" in client.stderr.read()
    assert client.wait(LIMIT_S) == 1


def test_a_rate_below_the_minimum_fails() -> None:
    flags = ["--local", "-s", "64K", *QUICK, "--json", "-", "--min-bw"]
    low = bw(*flags, "999999")
    assert low.returncode == 4
    assert "below --min-bw 999999 GB/s: 64K at" in low.stderr
    assert json.loads(low.stdout)["errors"]
    assert bw(*flags, "0.000001").returncode == 0


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--local", "-s", "4X"], "'4X' is not a size"),
        (["--local", "--backend", "verbs"], "the verbs backend cannot be used here"),
        (["--local", "--mem", "cuda:99"], "needs a GPU"),
        (["--local", "-s", "1T", "--batch", "1000"], "GiB are free"),
        (["127.0.0.1"], "set SKIPPER_BW_TOKEN as the server printed it"),
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


def test_both_ends_may_have_the_secret_in_a_file(tmp_path: Path, start: Start) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret of both ends\n")
    secret.chmod(0o600)
    server = start("-p", "0", "--secret-file", str(secret), token=None)
    assert server.stdout is not None
    line = next(line for line in server.stdout if "--secret-file" in line)
    assert "a secret of both ends" not in line
    assert "SKIPPER_BW_TOKEN" not in line
    address, *flags = line.partition("bandwidth ")[2].split()
    done = bw(address, *flags, "-s", "4K", *QUICK)
    assert done.returncode == 0, done.stderr
    secret.chmod(0o644)
    refused = bw(address, *flags)
    assert refused.returncode == 2
    assert str(secret) in refused.stderr


def test_help_names_the_exit_codes() -> None:
    done = bw("--help")
    assert done.returncode == 0
    assert "exit codes" in done.stdout


def test_bad_input_exits_with_2_and_one_sentence() -> None:
    done = bw("--local", "-s", "4X")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("python -m skipper.benchmarks.bandwidth: argument -s/--size: '4X' is not a size")


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
        from skipper.benchmarks.bandwidth import command
        command.require_feasible = command.configure = lambda *_, **__: None
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
    terminal.wait_for("first use")
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
    terminal.wait_for("first use")
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
    terminal.wait_for("first use")
    children = psutil.Process(client.pid).children()
    os.killpg(client.pid, signal.SIGINT)
    out, _ = client.communicate(timeout=LIMIT_S)
    assert client.returncode == 130
    assert "Traceback" not in terminal.rest()
    assert json.loads(out)["errors"] == ["interrupted"]
    assert len(children) == 1
    assert not children[0].is_running()


def test_a_killed_client_takes_its_local_server_along(start: Start, terminal: Terminal) -> None:
    client = start("--local", "-s", "64K", "-D", "300", "--json", "-", stderr=terminal.theirs)
    terminal.wait_for("first use")
    children = psutil.Process(client.pid).children()
    client.kill()
    gone, alive = psutil.wait_procs(children, timeout=LIMIT_S)
    assert (len(gone), alive) == (1, [])


def test_an_owner_that_dies_ends_a_local_run(start: Start, terminal: Terminal) -> None:
    client = start("--local", "-s", "64K", "-D", "300", "--json", "-", stderr=terminal.theirs)
    terminal.wait_for("first use")
    psutil.Process(client.pid).children()[0].kill()
    out, _ = client.communicate(timeout=LIMIT_S)
    assert client.returncode == 1
    assert len(json.loads(out)["errors"]) == 1
