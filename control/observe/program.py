"""What the commands of this folder share: how they name the job, how long they wait, and how an error ends them."""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Callable, Mapping, Sequence

from skipper.commandline import STDOUT, CommandParser, add_host, add_job, add_timeout
from skipper.commandline import run as run_command
from skipper.control.model.errors import ControlError
from skipper.control.runtime.process import Process
from skipper.control.support.pages import PageServer

UNREACHABLE = 3
_LOOK_S = 2.0


def parser_of(
    prog: str, description: str, *, timeout_s: float, exit_codes: Mapping[int, str] | None = None, notes: str = ""
) -> CommandParser:
    """A parser with ``--job`` and ``--timeout``."""
    codes = {UNREACHABLE: "the job cannot be reached", **(exit_codes or {})}
    parser = CommandParser(prog=prog, description=description, exit_codes=codes, notes=notes)
    add_job(parser)
    add_timeout(parser, timeout_s, "seconds to wait for the answer of a process")
    return parser


def add_served_host(parser: CommandParser) -> None:
    """``--host ADDRESS`` of pages about the job."""
    what = "address to listen on (default: 127.0.0.1, this host only); any other needs the token that is printed"
    add_host(parser, what=what)


def take_words(given: argparse.Namespace) -> None:
    """Move the word that ``--json`` has taken as PATH to WHO, if it is not a path: WHO may follow the flag."""
    word = given.json
    if word not in (None, STDOUT) and "/" not in word and not word.endswith(".json"):
        given.who.insert(0, word)
        given.json = STDOUT


def run(parser: argparse.ArgumentParser, argv: Sequence[str], action: Callable[[argparse.Namespace], int]) -> int:
    """Parse the arguments and run ``action``; returns its exit code, 2 for bad arguments, 3 without a job."""
    return run_command(parser, argv, action, errors=(ControlError,), status=UNREACHABLE)


def serve(process: Process, start: Callable[[], PageServer], place: str) -> int:
    """Serve pages about the job that ``process`` visits until the job ends; prints the URL, returns the exit code."""
    root = process.transport.link(process.root)
    return serve_until(start, place, lambda: root.lost is not None)


def serve_until(start: Callable[[], PageServer], place: str, is_over: Callable[[], bool]) -> int:
    """Serve pages about a job until it is over; prints the URL, returns the exit code."""
    try:
        server = start()
    except OSError as error:
        sys.stderr.write(f"cannot serve at {place}: {error.strerror}\n")
        return 2
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    with server:
        sys.stdout.write(f"{server.url}\n")
        sys.stdout.flush()
        over = threading.Event()
        while not is_over():
            over.wait(_LOOK_S)
    sys.stderr.write("the job has ended\n")
    return 0
