from pathlib import Path

import pytest

from skipper.benchmarks.bandwidth.options import DEFAULT_PORT, Options, parse
from skipper.benchmarks.errors import UsageError
from skipper.benchmarks.sizes import SWEEP


def options(*argv: str) -> Options:
    return parse(argv, prog="skipper bw")


def test_no_argument_starts_a_server_on_the_loopback() -> None:
    given = options()
    assert (given.role, given.host, given.port) == ("server", "127.0.0.1", DEFAULT_PORT)


@pytest.mark.parametrize(
    ("argv", "host", "port"),
    [
        (["node7"], "node7", DEFAULT_PORT),
        (["node7:99"], "node7", 99),
        (["node7", "-p", "99"], "node7", 99),
        (["[::1]:99"], "::1", 99),
        (["[fe80::1]"], "fe80::1", DEFAULT_PORT),
    ],
)
def test_a_host_makes_a_client(argv: list[str], host: str, port: int) -> None:
    given = options(*argv)
    assert (given.role, given.host, given.port) == ("client", host, port)


def test_sizes_repeat_in_the_order_given_and_once() -> None:
    assert options("--local", "-s", "1M", "-s", "4K", "-s", "1024K").sizes == (1 << 20, 4096)
    assert options("--local", "-a").sizes == SWEEP
    assert options("--local").sizes == (64 << 20,)
    assert options("--local", "--latency").sizes == (4096,)


def test_flags_of_perftest_and_nccl_tests_mean_the_same_here() -> None:
    given = options("--local", "--minbytes", "4K", "-e", "64K", "-f", "2", "--warmup_iters", "3", "-n", "7")
    assert given.sizes == (4096, 8192, 16384, 32768, 65536)
    assert (given.measure.warmup, given.measure.iterations) == (3, 7)
    assert options("--local", "-e", "64K").sizes == (4096, 16384, 65536)
    assert options("--local", "--minbytes", "256M").sizes == (256 << 20, 1 << 30)
    given = options("node7", "-d", "mlx5_0", "--use_cuda", "1")
    assert (given.net_devices, given.workload.mem) == ("mlx5_0", "cuda:1")
    assert options("--ib-dev=mlx5_0", "--host", "0.0.0.0").net_devices == "mlx5_0"


def test_a_quick_run_takes_four_transfers_unless_it_is_told_otherwise() -> None:
    quick = options("--local", "--quick").measure
    assert (quick.iterations, quick.warmup, quick.duration_s) == (4, 1, None)
    told = options("--local", "--quick", "-n", "9", "-w", "2").measure
    assert (told.iterations, told.warmup) == (9, 2)
    assert options("--local", "--quick", "-D", "1").measure.iterations is None


def test_the_workload_says_what_both_sides_prepare_for() -> None:
    given = options("--local", "-s", "4K", "-s", "1M", "--op", "write", "-b", "--batch", "3", "--timeout", "5")
    assert given.workload.largest == 1 << 20
    assert (given.workload.op, given.workload.batch) == ("write", 3)
    assert (given.workload.bidirectional, given.workload.timeout_s) == (True, 5.0)


def test_the_printed_client_command_repeats_what_concerns_the_client() -> None:
    argv = ["--bind", "0.0.0.0", "-s", "1M", "-p", "7", "--check", "--port=8", "-p9", "--net-devices", "eth0"]
    assert options(*argv[:7]).client_flags == ("-s", "1M", "--check")
    assert options(*argv[2:4], *argv[7:]).client_flags == ("-s", "1M")
    assert options("--host", "0.0.0.0", "-d", "mlx5_0", "-s", "1M", "-dmlx5_1").client_flags == ("-s", "1M")


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--local", "node7"], "--local"),
        (["a:b:c"], "HOST:PORT"),
        (["node7:70000"], "port"),
        (["node7:1", "-p", "2"], "two ports"),
        (["node7", "--bind", "0.0.0.0"], "--bind"),
        (["--local", "-s", "4KB"], "not a size"),
        (["--local", "-a", "-s", "4K"], "exclude"),
        (["--local", "-e", "4K", "-s", "4K"], "exclude"),
        (["--local", "--minbytes", "1M", "-e", "4K"], "more than --maxbytes 4K"),
        (["--local", "-f", "1"], "from 2"),
        (["--local", "--op", "fetch-add", "--maxbytes", "4K"], "one word"),
        (["--local", "--use_cuda", "x"], "host nor cuda"),
        (["--local", "-p", "70000"], "there is no port"),
        (["--local", "-n", "0"], "whole number"),
        (["--local", "-n", "1.5"], "whole number"),
        (["--local", "-w", "-1"], "expected one argument|whole number"),
        (["--local", "-D", "0"], "positive"),
        (["--local", "-D", "nan"], "positive"),
        (["--local", "--min-bw", "lots"], "positive"),
        (["--local", "--batch", "0"], "whole number"),
        (["--local", "--batch", "100001"], "from 1 to 100000"),
        (["--local", "--op", "copy"], "--op"),
        (["--local", "--backend", "carrier-pigeon"], "--backend"),
        (["--local", "--mem", "cuda:x"], "host nor cuda"),
        (["--local", "--latency", "-b"], "--latency"),
        (["--local", "--latency", "--min-bw", "1"], "--latency"),
        (["--local", "--pairs", "0"], "from 1 to 256"),
        (["--local", "--pairs", "2", "-b"], "one pair"),
        (["--local", "--op", "fetch-add", "-s", "4K"], "one word"),
        (["--local", "--copy-threads", "65"], "from 1 to 64"),
        (["--json", "-"], "measures nothing"),
        (["--local", "--json", "no/such/folder/x.json"], "no folder"),
        (["--local", "--bogus"], "--bogus"),
        (["--local", "--sizes", "4K"], "did you mean --size"),
        (["--local", "--it", "4"], "unrecognized arguments: --it"),
    ],
)
def test_contradictions_are_refused_in_words(argv: list[str], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        options(*argv)


def test_the_config_of_a_report_holds_no_path_and_no_address(tmp_path: Path) -> None:
    given = options("10.1.2.3:4", "--json", str(tmp_path / "x.json"))
    assert str(tmp_path) not in str(given.config())
    assert "10.1.2.3" not in str(given.config())
