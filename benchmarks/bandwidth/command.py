"""``skipper bw`` from the command line to the exit code."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING

from skipper.benchmarks import program
from skipper.benchmarks.bandwidth.channel import handle_secret
from skipper.benchmarks.bandwidth.compare import COMPARE
from skipper.benchmarks.bandwidth.compare import main as compare_main
from skipper.benchmarks.bandwidth.options import LOOPBACK, Options, parse, parser
from skipper.benchmarks.bandwidth.pairs import run_pairs
from skipper.benchmarks.bandwidth.rows import RowPrinter, notes
from skipper.benchmarks.bandwidth.secret import TOKEN_VARIABLE, BandwidthSecret, made_up, secret_of
from skipper.benchmarks.bandwidth.server import listen, reach, serve
from skipper.benchmarks.bandwidth.session import run
from skipper.benchmarks.bandwidth.side import configure, footprint, require_feasible
from skipper.benchmarks.errors import BelowMinimumError, BenchmarkError, UsageError
from skipper.benchmarks.output import plot_rates
from skipper.benchmarks.report import Result
from skipper.benchmarks.sizes import format_size
from skipper.commandline import INTERRUPTED, STDOUT
from skipper.dataplane.errors import DataplaneError

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["main", "parser"]

_EVERYWHERE = ("0.0.0.0", "::")


def main(argv: Sequence[str], *, prog: str = "skipper bw") -> int:
    """Run the bandwidth benchmark; returns the exit code, as ``--help`` lists them."""
    if list(argv[:1]) == [COMPARE]:
        return compare_main(argv[1:], prog=f"{prog} {COMPARE}")
    try:
        options = parse(argv, prog=prog)
        if options.role == "server":
            return _serve(options, prog)
        return _measure(options, argv, prog)
    except SystemExit as leave:  # argparse's, after --help
        return leave.code if isinstance(leave.code, int) else 0
    except BenchmarkError as error:
        _complain(prog, error)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED


def _serve(options: Options, prog: str) -> int:
    secret = secret_of(options.secret_file) or made_up()
    try:
        listener = listen(options.host, options.port)
    except OSError as error:
        where = f"{options.host}, port {options.port}"
        raise UsageError(f"cannot listen on {where}: {error.strerror or error}; see --bind, --port") from error
    with listener:
        port: int = listener.getsockname()[1]
        print(_greeting(options, secret, port, prog), flush=True)
        # The address at which other hosts reach verbs, which cannot be the wildcard.
        reachable = None if options.host in (LOOPBACK, "::1", *_EVERYWHERE) else options.host
        serve(
            listener,
            secret.value,
            at_once=options.pairs,
            net_devices=options.net_devices,
            reachable=reachable,
            log=_log,
        )
    return 0


def _greeting(options: Options, secret: BandwidthSecret, port: int, prog: str) -> str:
    host = socket.gethostname() if options.host in _EVERYWHERE else options.host
    peer = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    command = " ".join([f"{secret.prefix}{prog}", peer, *options.client_flags])
    return f"Waiting for clients on {peer}, until Ctrl-C. On the client, type:\n\n    {command}\n"


def _measure(options: Options, argv: Sequence[str], prog: str) -> int:
    workload = options.workload
    nbytes = footprint(workload, client=True)
    if options.role == "local":
        nbytes += footprint(workload, client=False)
    require_feasible(workload, nbytes * options.pairs)
    secret = made_up() if options.role == "local" else secret_of(options.secret_file)
    if secret is None:
        raise UsageError(
            f"a client needs the server's secret: pass --secret-file, or set {TOKEN_VARIABLE} as the server printed it"
        )

    printer = RowPrinter(sys.stderr if options.json == STDOUT else sys.stdout, lambda first: _title(first, options))

    def measure(results: list[Result]) -> None:
        with contextlib.closing(_rows(options, secret.value)) as rows:
            for row in rows:
                results.append(row)
                printer.add(row)
        _require_minimum(results, options)

    return program.run(
        argv,
        measure,
        prog=prog,
        json=options.json,
        csv=options.csv,
        tables=lambda results: _below(results, options),
        config=options.config,
        failures=(DataplaneError, OSError, MemoryError),
    )


def _rows(options: Options, token: bytes) -> Generator[Result]:
    """Measure, by one pair or by many."""
    server = None if options.role == "local" else (options.host, options.port)
    if options.pairs > 1:
        yield from run_pairs(
            options.workload,
            options.sizes,
            pairs=options.pairs,
            measure=options.measure,
            server=server,
            token=token,
            net_devices=options.net_devices,
        )
        return
    with reach(server, token, net_devices=options.net_devices, timeout=options.workload.timeout_s) as channel:
        configure(options.workload, options.net_devices, secret=handle_secret(token))
        devices = options.net_devices
        yield from run(channel, options.workload, options.sizes, measure=options.measure, net_devices=devices)


def _require_minimum(results: Sequence[Result], options: Options) -> None:
    if options.min_bw is None:
        return
    low = [
        f"{format_size(int(str(row.parameters['size'])))} at {row.value:.3g} GB/s"
        for row in results
        if row.name == f"{options.workload.op}_bandwidth" and row.value < options.min_bw
    ]
    if low:
        raise BelowMinimumError(f"below --min-bw {options.min_bw:g} GB/s: {', '.join(low)}")


def _title(first: Result, options: Options) -> str:
    workload = options.workload
    ways = ", both directions at once" if workload.bidirectional else ""
    pairs = f", {options.pairs} pairs at once" if options.pairs > 1 else ""
    return f"{workload.op}, {first.parameters['backend']}, {workload.mem} memory{ways}{pairs}"


def _below(results: Sequence[Result], options: Options) -> Iterator[Text]:
    """Yield the notes below the table, and then draw the picture if one was asked for."""
    from rich.text import Text

    yield Text(notes(results))
    if options.plot is not None:
        plot_rates(results, options.plot, title=_title(results[0], options))


def _complain(prog: str, what: object) -> None:
    print(f"{prog}: {what}", file=sys.stderr)


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
