"""``skipper metrics``: the figures of a running job for Prometheus, printed once or served."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from skipper.control.observe.job_query import survey
from skipper.control.observe.metrics import TIMEOUT_S, metrics_text, serve_metrics
from skipper.control.observe.program import parser_of, run, serve
from skipper.control.observe.status import status_of
from skipper.control.observe.visit import visiting
from skipper.control.support.private_file import read_secret


def main(argv: Sequence[str], *, prog: str = "skipper metrics") -> int:
    """Print or serve the figures of a job.

    Args:
        argv: the arguments, without the program's name.
        prog: what was typed before them.

    Returns:
        The exit code; ``--help`` lists them.
    """
    parser = parser_of(prog, "The figures of a running job in Prometheus' text format.", timeout_s=TIMEOUT_S)
    parser.add_argument(
        "--serve",
        type=int,
        metavar="PORT",
        help="serve them under /metrics, and /health, until Ctrl-C or the job's end; 0: a port that is free",
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to serve at; default: 127.0.0.1, this host only. Others need the token that is printed",
    )
    parser.add_argument("--token", action="store_true", help="ask for a token on this host, too: it has other users")
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="the token to ask for, in a file that only you can read"
    )
    return run(parser, argv, _show)


def _show(given: argparse.Namespace) -> int:
    token: str | bool | None = given.token or None
    if given.token_file is not None:
        token = read_secret(given.token_file, least_nbytes=1).decode("utf-8", "replace").strip()
    with visiting(given.job, timeout=given.timeout) as process:
        if given.serve is None:
            sys.stdout.write(metrics_text(status_of(survey(process, "status", timeout=given.timeout))))
            return 0
        return serve(
            process,
            lambda: serve_metrics(given.serve, given.host, timeout=given.timeout, token=token),
            f"{given.host}:{given.serve}",
        )
