"""``skipper status``: a running job at a glance, once or again and again."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

from skipper.control.model.errors import SupervisionError
from skipper.control.observe.job_query import survey
from skipper.control.observe.program import parser_of, run, seconds
from skipper.control.observe.status import JobStatus, status_of
from skipper.control.observe.status_view import view
from skipper.control.observe.visit import visiting


def main(argv: Sequence[str], *, prog: str = "skipper status") -> int:
    """Show what a job is doing.

    Args:
        argv: the arguments, without the program's name.
        prog: what was typed before them.

    Returns:
        The exit code; ``--help`` lists them. 1 where a process does not answer.
    """
    parser = parser_of(prog, "What a running job consists of, and what it is doing.", timeout_s=3.0)
    parser.add_argument("--json", action="store_true", help="print JSON; with --watch one line for each look")
    parser.add_argument(
        "-w",
        "--watch",
        nargs="?",
        type=seconds,
        const=1.0,
        default=None,
        metavar="S",
        help="look again every S seconds (1) until Ctrl-C or the job's end",
    )
    parser.add_argument("-n", "--times", type=int, default=None, metavar="N", help="with --watch: N times at most")
    return run(parser, argv, _show)


def _show(given: argparse.Namespace) -> int:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 140  # a pipe has none
    with visiting(given.job, timeout=given.timeout) as process:
        previous: JobStatus | None = None
        left: int | None = given.times
        while True:
            begun = time.monotonic()
            try:
                status = status_of(survey(process, "status", timeout=given.timeout))
            except SupervisionError:
                if previous is None:
                    raise
                sys.stderr.write("the job has ended\n")
                return 0
            if given.json:
                text = json.dumps(status.to_dict(), indent=2 if given.watch is None else None)
                sys.stdout.write(text + "\n")
                sys.stdout.flush()
            else:
                if given.watch is not None and console.is_terminal:
                    console.clear()
                console.print(view(status, previous))
            previous = status
            left = None if left is None else max(left - 1, 0)
            if given.watch is None or left == 0:
                return 0 if status.is_healthy else 1
            time.sleep(max(given.watch - (time.monotonic() - begun), 0.05))
