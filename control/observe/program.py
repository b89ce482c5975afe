"""What the commands of this folder share: how they name the job, how long they wait, and how an error ends them."""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Callable, Sequence

from skipper.control.model.errors import ControlError
from skipper.control.runtime.process import Process
from skipper.control.support import command_line
from skipper.control.support.pages import PageServer

EXIT_CODES = """\
exit codes: 0 done; 1 something is not as it should be, and was said; 2 bad arguments; 3 the job cannot be reached
"""
UNREACHABLE = 3
_LOOK_S = 2.0


def parser_of(prog: str, description: str, *, timeout_s: float) -> argparse.ArgumentParser:
    """A parser with ``--job`` and ``--timeout``."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "-j",
        "--job",
        metavar="JOB",
        help="name of the job or path of its connection file; default: what SKIPPER_JOB says, or your only job",
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=timeout_s,
        metavar="S",
        help=f"seconds that a process has to answer; default: {timeout_s:g}",
    )
    return parser


def run(parser: argparse.ArgumentParser, argv: Sequence[str], action: Callable[[argparse.Namespace], int]) -> int:
    """Parse the arguments and run ``action``; returns its exit code, 2 for bad arguments, 3 without a job."""
    return command_line.run(parser, argv, action, errors=(ControlError,), status=UNREACHABLE)


def serve(process: Process, start: Callable[[], PageServer], place: str) -> int:
    """Serve pages about the job that ``process`` visits until the job ends; prints the URL, returns the exit code."""
    try:
        server = start()
    except OSError as error:
        sys.stderr.write(f"{place} cannot be served at: {error.strerror}\n")
        return 2
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    with server:
        sys.stdout.write(f"{server.url}\n")
        sys.stdout.flush()
        root, over = process.transport.link(process.root), threading.Event()
        while root.lost is None:
            over.wait(_LOOK_S)
    sys.stderr.write("the job has ended\n")
    return 0


def seconds(text: str) -> float:
    """A time span given as an argument; it raises `ValueError` or `argparse.ArgumentTypeError` for anything else."""
    span = float(text)
    if not 0 < span < float("inf"):
        raise argparse.ArgumentTypeError(f"a positive number of seconds, not {text}")
    return span
