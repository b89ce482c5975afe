"""The command line of ``skipper bw``: what was asked for, and whether it can be."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from skipper.benchmarks.backends import add_backend
from skipper.benchmarks.bandwidth.messages import ATOMICS, WORD, Workload
from skipper.benchmarks.bandwidth.secret import TOKEN_VARIABLE
from skipper.benchmarks.errors import UsageError
from skipper.benchmarks.output import check_can_plot
from skipper.benchmarks.program import Parser
from skipper.benchmarks.sizes import SWEEP, format_size, parse_size, size_argument
from skipper.commandline import (
    STDOUT,
    add_csv,
    add_host,
    add_json,
    add_port,
    add_quick,
    add_secret_file,
    add_timeout,
    number,
    output_path,
    say_more,
    whole,
)
from skipper.trust import SECRET_VARIABLE

__all__ = ["DEFAULT_PORT", "LOOPBACK", "Measure", "Options", "parse", "parser"]

DEFAULT_PORT = 18515
"""The port that perftest's tools use."""

MAX_BATCH = 100_000
"""Most buffers of one transfer; the side channel's longest message holds the addresses of as many."""

MAX_PAIRS = 256

LOOPBACK = "127.0.0.1"

_NOTES = f"""\
Without HOST and --local this is the server: it prints the command to run on the client. The flags of the
client decide what is measured. Sizes are in units of 1024: 4K, 4800K, 64M, 1G. GB/s are decimal, Gb/s are bits.
Both ends need the same secret. A server without one makes a new one, and prints it as {TOKEN_VARIABLE} in
the client's command.
`skipper bw compare A.json B.json` compares two reports.
"""

_EXIT_CODES = {
    2: "the request is impossible; nothing was started",
    3: "--check found wrong data",
    4: "a bandwidth is below --min-bw",
}

_QUICK_ITERATIONS = 4
_STEP_FACTOR = 4
"""The factor between two sizes of `SWEEP`."""

_OF_A_SERVER = ("--bind", "--host", "-p", "--port", "-d", "--net-devices", "--ib-dev")

_PEER = re.compile(r"(?:\[(?P<six>[^\]]+)\]|(?P<host>[^:\[\]]+))(?::(?P<port>[0-9]{1,5}))?")
_MEM = re.compile(r"host|cuda(:[0-9]{1,3})?")


@dataclass(frozen=True, slots=True)
class Measure:
    """How the client measures. ``None``: chosen for each size, see `timing`."""

    iterations: int | None
    warmup: int | None
    duration_s: float | None
    check: bool
    latency: bool


@dataclass(frozen=True, slots=True)
class Options:
    """One command line, free of contradictions. `side.require_feasible` checks it against this machine.

    Attributes:
        role: ``server``, ``client`` or ``local``.
        host: Server to reach, or address to listen on.
        client_flags: The flags that a client repeats, as they were typed.
    """

    role: str
    host: str
    port: int
    workload: Workload
    pairs: int
    sizes: tuple[int, ...]
    measure: Measure
    min_bw: float | None
    json: str | None
    csv: str | None
    plot: str | None
    net_devices: str | None
    secret_file: str | None
    client_flags: tuple[str, ...]

    def config(self) -> dict[str, Any]:
        """What a report says about the run; no paths, no addresses."""
        return {
            "tool": "bandwidth",
            "role": self.role,
            "sizes": list(self.sizes),
            **asdict(self.workload),
            "pairs": self.pairs,
            **asdict(self.measure),
            "min_bw_gb_per_s": self.min_bw,
            "net_devices": self.net_devices,
        }


def parse(argv: Sequence[str], *, prog: str) -> Options:
    """Read the command line.

    Raises:
        UsageError: It contradicts itself, or names something unknown.
        SystemExit: ``--help`` was asked for and printed.
    """
    given = parser(prog).parse_args(list(argv))
    say_more(given)
    role = "local" if given.local else "server" if given.peer is None else "client"
    _require_consistent(given, role)
    if given.plot is not None:
        check_can_plot()
    host, port = _address(given)
    sizes = _sizes(given)
    workload = Workload(
        op=given.op,
        backend=given.backend,
        mem=given.mem,
        batch=given.batch,
        largest=max(sizes),
        bidirectional=given.bidirectional,
        timeout_s=given.timeout,
        copy_threads=given.copy_threads,
    )
    return Options(
        role=role,
        host=host,
        port=port,
        workload=workload,
        pairs=given.pairs,
        sizes=sizes,
        measure=_how(given),
        min_bw=given.min_bw,
        json=given.json,
        csv=given.csv,
        plot=given.plot,
        net_devices=given.net_devices,
        secret_file=given.secret_file,
        client_flags=_client_flags(argv),
    )


def parser(prog: str) -> Parser:
    """The parser of the command, except for ``skipper bw compare``."""
    own = Parser(
        prog=prog,
        description="Measure bandwidth and latency of one-sided reads and writes, and of memcpy to compare.",
        notes=_NOTES,
        exit_codes=_EXIT_CODES,
    )
    ends = own.add_argument_group("the two ends")
    ends.add_argument("peer", nargs="?", metavar="HOST[:PORT]", help="run as client of the server at this address")
    ends.add_argument("--local", action="store_true", help="start a server process as well, and run as its client")
    add_host(ends, "--bind", default=None, what=f"address that a server listens on (default: {LOOPBACK})")
    add_port(ends, "-p", what=f"TCP port (default: {DEFAULT_PORT}; 0: any free)")
    ends.add_argument(
        "-d",
        "--net-devices",
        "--ib-dev",
        metavar="NAMES",
        help="network devices that UCX may use (default: loopback only), or RDMA devices for verbs",
    )
    ends.add_argument(
        "--pairs",
        type=whole(1, MAX_PAIRS),
        default=1,
        metavar="N",
        help="pairs of clients and servers that run at the same time (default: 1)",
    )
    add_secret_file(ends, f"the file that {SECRET_VARIABLE} names")
    add_timeout(ends, 60.0, "seconds allowed for one transfer")

    work = own.add_argument_group("what is transferred")
    work.add_argument(
        "-s",
        "--size",
        action="append",
        type=size_argument,
        metavar="SIZE",
        help="size in bytes; repeat the flag for several",
    )
    sweep = f"{format_size(SWEEP[0])} to {format_size(SWEEP[-1])}"
    work.add_argument("-a", "--all", action="store_true", help=f"sizes from {sweep}, each four times the one before")
    work.add_argument(
        "--minbytes", type=size_argument, metavar="SIZE", help="instead of --size: smallest of several sizes"
    )
    work.add_argument("-e", "--maxbytes", type=size_argument, metavar="SIZE", help="largest of several sizes")
    work.add_argument(
        "-f",
        "--stepfactor",
        type=whole(2, 1 << 20),
        metavar="N",
        help=f"factor from one size to the next (default: {_STEP_FACTOR})",
    )
    work.add_argument(
        "--op",
        choices=("read", "write", *ATOMICS),
        default="read",
        help="the operation, as seen by the client (default: read)",
    )
    work.add_argument("-b", "--bidirectional", action="store_true", help="both ends transfer at the same time")
    add_backend(work)
    work.add_argument("--mem", type=_mem, default="host", metavar="host|cuda[:N]", help="memory at both ends")
    work.add_argument(
        "--use_cuda", dest="mem", type=_cuda, default=argparse.SUPPRESS, metavar="N", help="the same as --mem cuda:N"
    )
    work.add_argument(
        "--batch", type=whole(1, MAX_BATCH), default=1, metavar="N", help="buffers in one transfer (default: 1)"
    )
    work.add_argument(
        "--copy-threads",
        type=whole(1, 64),
        default=0,
        metavar="N",
        help="threads that copy large blocks (default: one per core, 4 at most)",
    )

    how = own.add_argument_group("measurement")
    how.add_argument("-n", "--iters", type=whole(1), metavar="N", help="number of timed transfers of each size")
    how.add_argument(
        "-w", "--warmup", "--warmup_iters", type=whole(0), metavar="N", help="number of untimed transfers before them"
    )
    how.add_argument(
        "-D", "--duration", type=number(), metavar="S", help="measure each size for this many seconds instead"
    )
    add_quick(how, f"{_QUICK_ITERATIONS} transfers of each size, to check that it works; the figures mean nothing")
    how.add_argument("--latency", action="store_true", help="report the time of a transfer, not the rate")
    how.add_argument(
        "--check",
        action="store_true",
        help="verify the data, and that this check finds a byte that was made wrong on purpose",
    )

    out = own.add_argument_group("results")
    out.add_argument("--min-bw", type=number(), metavar="GB/s", help="exit with 4 when a median is below this")
    add_json(out)
    add_csv(out)
    out.add_argument("--plot", type=output_path, metavar="PATH.png", help="plot the rates over the sizes")
    return own


def _require_consistent(given: argparse.Namespace, role: str) -> None:
    if given.peer is not None and given.local:
        raise UsageError("--local starts its own server: pass either HOST or --local")
    if given.host is not None and role != "server":
        raise UsageError("--bind (--host) is the address that a server listens on: leave it out for a client")
    if given.latency and (given.bidirectional or given.min_bw is not None):
        raise UsageError("--latency times one transfer at a time; --bidirectional and --min-bw ask for rates")
    if given.op in ATOMICS and (
        _chooses_sizes(given) or given.batch > 1 or given.bidirectional or given.pairs > 1 or given.min_bw is not None
    ):
        raise UsageError(f"{given.op} is timed on one word: no --size, --batch, --bidirectional, --pairs, --min-bw")
    if given.pairs > 1 and (given.latency or given.bidirectional):
        raise UsageError("--pairs measures rates in one direction; --latency and --bidirectional are for one pair")
    if given.json == STDOUT and role == "server":
        raise UsageError("a server measures nothing: pass --json to its client")


def _address(given: argparse.Namespace) -> tuple[str, int]:
    """Where the server is, or listens."""
    host, port = (given.host or LOOPBACK, None) if given.peer is None else _peer(given.peer)
    if given.port is not None and port is not None and port != given.port:
        raise UsageError(f"{given.peer} and --port {given.port} name two ports")
    port = next(value for value in (port, given.port, DEFAULT_PORT) if value is not None)
    if port > 65535:
        raise UsageError(f"there is no port {port}")
    return host, port


def _sizes(given: argparse.Namespace) -> tuple[int, ...]:
    swept = given.minbytes or given.maxbytes or given.stepfactor
    if sum(map(bool, (given.all, given.size, swept))) > 1:
        raise UsageError("--size, --all, and --minbytes with --maxbytes exclude each other")
    if given.op in ATOMICS:
        return (WORD,)
    if swept:
        return _swept(given.minbytes or SWEEP[0], given.maxbytes or SWEEP[-1], given.stepfactor or _STEP_FACTOR)
    default = parse_size("4K") if given.latency else parse_size("64M")
    return SWEEP if given.all else tuple(dict.fromkeys(given.size or [default]))


def _chooses_sizes(given: argparse.Namespace) -> bool:
    return bool(given.size or given.all or given.minbytes or given.maxbytes or given.stepfactor)


def _swept(least: int, most: int, factor: int) -> tuple[int, ...]:
    if least > most:
        raise UsageError(f"--minbytes {format_size(least)} is more than --maxbytes {format_size(most)}")
    sizes = [least]
    while sizes[-1] * factor <= most:
        sizes.append(sizes[-1] * factor)
    return tuple(sizes)


def _how(given: argparse.Namespace) -> Measure:
    iterations, warmup = given.iters, given.warmup
    if given.quick:
        iterations = iterations if given.duration or iterations else _QUICK_ITERATIONS
        warmup = 1 if warmup is None else warmup
    return Measure(iterations, warmup, given.duration, check=given.check, latency=given.latency)


def _peer(text: str) -> tuple[str, int | None]:
    match = _PEER.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is not HOST or HOST:PORT (an IPv6 address in brackets: [::1]:18515)")
    return match["six"] or match["host"], None if match["port"] is None else int(match["port"])


def _client_flags(argv: Sequence[str]) -> tuple[str, ...]:
    """``argv`` without the flags that are for a server only: those of the client's command, which the server prints."""
    kept: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        flag, equals, _ = argument.partition("=")
        if flag in _OF_A_SERVER:
            if not equals:
                next(arguments, None)
        elif not re.fullmatch(r"-(p[0-9]+|d[^-].*)", argument):
            kept.append(argument)
    return tuple(kept)


def _cuda(text: str) -> str:
    return _mem(f"cuda:{text}")


def _mem(text: str) -> str:
    if not _MEM.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is neither host nor cuda nor cuda:N")
    return text
