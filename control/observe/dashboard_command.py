"""``skipper dashboard``: a running job in a browser."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from skipper.control.observe.dashboard import INTERVAL_S, TIMEOUT_S, Dashboard, serve_dashboard
from skipper.control.observe.program import parser_of, run, seconds, serve
from skipper.control.observe.visit import visiting


def main(argv: Sequence[str], *, prog: str = "skipper dashboard") -> int:
    """Serve the dashboard of a job until Ctrl-C or the job's end.

    Args:
        argv: the arguments, without the program's name.
        prog: what was typed before them.

    Returns:
        The exit code; ``--help`` lists them.
    """
    parser = parser_of(prog, "A running job in a browser; prints the address to open.", timeout_s=TIMEOUT_S)
    parser.add_argument("--port", type=int, default=0, metavar="PORT", help="to serve at; default: one that is free")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to serve at; default: 127.0.0.1, this host only. Others need the token that is printed",
    )
    parser.add_argument(
        "--interval", type=seconds, default=INTERVAL_S, metavar="S", help=f"between looks; default: {INTERVAL_S:g}"
    )
    parser.add_argument("--token", action="store_true", help="ask for a token on this host, too: it has other users")
    return run(parser, argv, _serve)


def _serve(given: argparse.Namespace) -> int:
    def start() -> Dashboard:
        return serve_dashboard(
            given.port, given.host, interval=given.interval, timeout=given.timeout, with_token=given.token or None
        )

    with visiting(given.job, timeout=given.timeout) as process:
        return serve(process, start, f"{given.host}:{given.port}")
