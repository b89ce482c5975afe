"""The rows of ``skipper bw``: what stands beside what, and that wrong bytes never pass for a rate."""

import json
import subprocess
import sys

import pytest

from tests.benchmarks.programs import LIMIT_S, QUICK, ROOT, TOKEN, Start, bw, heard, printed_command, rows


def test_ucx_stands_beside_the_kernels_own_copy() -> None:
    done = bw("--local", "-s", "64K", *QUICK, "--backend", "ucx", "--json", "-")
    assert done.returncode == 0, done.stderr
    _, own, kernel = rows(done.stdout)
    assert (own["backend"], kernel["name"]) == ("ucx", "process_vm_readv_bandwidth")
    assert own["ratio_to_process_vm_readv"] == pytest.approx(own["value"] / kernel["value"])


def test_a_batch_stands_beside_one_transfer_of_as_many_bytes() -> None:
    done = bw("--local", "-s", "4K", "--batch", "50", *QUICK, "--check", "--copy-threads", "1", "--json", "-")
    assert done.returncode == 0, done.stderr
    _, own, whole = rows(done.stdout)
    assert (own["batch"], own["segments"], own["copy_threads"]) == (50, 50, 1), "neighbouring buffers stay apart"
    assert (whole["name"], whole["batch"], whole["nbytes"]) == ("one_transfer_bandwidth", 1, own["nbytes"])
    assert own["ratio_to_one_transfer"] == pytest.approx(own["value"] / whole["value"])


@pytest.mark.parametrize("flags", [["--pairs", "2"], ["--pairs", "2", "--op", "write", "--backend", "ucx"]])
def test_pairs_move_and_verify_at_once(flags: list[str]) -> None:
    done = bw("--local", "-s", "64K", "-n", "40", *flags, "--check", "--json", "-")
    assert done.returncode == 0, done.stderr
    _, row = rows(done.stdout)
    assert (row["pairs"], row["n"], row["transfers_per_sample"], row["verified"]) == (2, 20, 4, True)
    assert row["reference"]["name"] == "memcpy by 2 at once"
    assert 0 < row["slowest_pair_gb_per_s"] <= row["fastest_pair_gb_per_s"]
    assert "2 pairs at once" in done.stderr


def test_a_server_for_pairs_serves_them_at_once(start: Start) -> None:
    server = start("-p", "0", "--pairs", "2", "-s", "64K")
    _, address, flags = printed_command(server)
    assert flags == ["--pairs", "2", "-s", "64K"]
    done = bw(address, *flags, *QUICK, "--json", "-", token=TOKEN)
    assert done.returncode == 0, done.stderr
    assert rows(done.stdout)[1]["pairs"] == 2
    assert {heard(server).split()[-1] for _ in range(2)} == {"begins"}
    wrong = bw(address, *flags, *QUICK, "--json", "-", token="a guess")
    assert wrong.returncode == 1
    assert "different tokens" in wrong.stderr


@pytest.mark.parametrize(("op", "backend"), [("fetch-add", "ucx"), ("compare-and-swap", "shm")])
def test_atomics_are_timed_beside_a_read_of_their_word(op: str, backend: str) -> None:
    done = bw("--local", "--op", op, "--backend", backend, "-n", "200", "--check", "--json", "-")
    assert done.returncode == 0, done.stderr
    _, row = rows(done.stdout)
    assert (row["name"], row["unit"], row["n"]) == (f"{op.replace('-', '_')}_latency", "us", 200)
    assert (row["nbytes"], row["verified"], row["reference"]["name"]) == (8, True, "read of the word")


def test_within_a_host_there_is_no_wire_and_the_row_says_so() -> None:
    _, row = rows(bw("--local", "-s", "4K", *QUICK, "--json", "-").stdout)
    assert (row["wire_gb_per_s"], row["ratio_to_wire"]) == (None, None)
    assert "no wire is crossed" in row["wire"]


def test_latency_rows_are_times() -> None:
    done = bw("--local", "--latency", "-s", "4K", *QUICK, "--json", "-")
    row = rows(done.stdout)[1]
    assert (row["name"], row["unit"], row["nbytes"]) == ("read_latency", "us", 4096)
    assert row["p50"] == row["p50_us"]


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        # Transfers that report success and move nothing; that lose one bit; a check that never finds anything.
        ("side.Side.mover = lambda self, size: lambda: None", "after the first transfer, byte 0 is"),
        ("side.Side.transfer = damaged", "after the first transfer, byte 777 is"),
        ("side.Side.verify = lambda *_, **__: None", "was corrupted on purpose, unnoticed by the check"),
    ],
)
def test_wrong_bytes_or_a_blind_check_fail_the_run(broken: str, says: str) -> None:
    program = f"""if True:
        import sys
        from skipper.benchmarks.bandwidth import command, side
        whole = side.Side.transfer
        def damaged(self, size, *, runs):
            elapsed = whole(self, size, runs=runs)
            self.local.put(777, self.local.peek(777, 778) ^ 1)
            return elapsed
        {broken}
        sys.exit(command.main(["--local", "-s", "64K", "-n", "2", "--check", "--json", "-"]))
    """
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 3
    assert says in done.stderr
    report = json.loads(done.stdout)
    assert report["errors"]
    assert [row["name"] for row in report["results"]] == ["first_use"]
