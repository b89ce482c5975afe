"""``skipper logs``: the output of the processes of a job, while it runs and after its end."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import re
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import TextIO

from skipper.commandline import FAILED, STDOUT, CommandParser, add_json
from skipper.control.observe.log_history import JobLog, LogEntry, find_job
from skipper.control.observe.log_lines import Line
from skipper.control.observe.log_output import painted, wants_colours
from skipper.control.observe.program import UNREACHABLE, run, take_words

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def parser(prog: str) -> CommandParser:
    """The parser of the command."""
    own = CommandParser(
        prog=prog,
        description="Show the output of the processes of a job, ordered by time. It is read from files, so the job may "
        "be busy, hang, or have ended.",
        exit_codes={FAILED: "none of the named processes has written anything", UNREACHABLE: "there is no such job"},
    )
    own.add_argument(
        "who",
        nargs="*",
        metavar="WHO",
        help="name of a mesh of processes or actors, with or without a rank (trainers, trainers[3], "
        "trainers[hosts=0,gpus=3]), or a pid; default: all",
    )
    own.add_argument(
        "-j",
        "--job",
        metavar="JOB",
        help="the job: its name or id, the name of its script, its connection file, or the folder of its output "
        "(default: the value of SKIPPER_JOB, or your latest job)",
    )
    own.add_argument("-f", "--follow", action="store_true", help="keep printing new output until the job has ended")
    own.add_argument(
        "--since",
        type=_since,
        metavar="T",
        help="only output of the last 90s, 10m, 2h, 1d, or since a time such as 14:30",
    )
    own.add_argument("-t", "--times", action="store_true", help="print the time of each line")
    add_json(own, "the lines, each as one object,")
    return own


def main(argv: Sequence[str], *, prog: str = "skipper logs") -> int:
    """Show what a job's processes have written; returns the exit code."""
    return run(parser(prog), argv, _show)


def _show(given: argparse.Namespace) -> int:
    take_words(given)
    try:
        folder = find_job(given.job)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    with contextlib.suppress(ValueError, OSError):  # each process has files of its own
        resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    since_s = float("-inf") if given.since is None else given.since
    with JobLog(folder, given.who) as log:
        if not log.chosen() and not (given.follow and log.is_running):
            known = ", ".join(dict.fromkeys(by.name for by in log.processes()))
            sys.stderr.write(
                f"{' or '.join(given.who) or 'nobody'} has written nothing; these have: {known or 'none'}\n"
            )
            return 1
        with _sink(given.json) as sink:
            for entry in log.follow(since_s=since_s) if given.follow else _so_far(log, since_s):
                _write(entry, given, sink)
    return 0


def _sink(path: str | None) -> contextlib.AbstractContextManager[TextIO]:
    return contextlib.nullcontext(sys.stdout) if path in (None, STDOUT) else open(path, "w", encoding="utf-8")


def _so_far(log: JobLog, since_s: float) -> Iterator[LogEntry]:
    yield from log.entries(since_s=since_s)
    yield from log.rest(since_s=since_s)


def _write(entry: LogEntry, given: argparse.Namespace, sink: TextIO) -> None:
    if given.json is not None:
        text = json.dumps(dataclasses.asdict(entry))
    else:
        prefix = Line(1, entry.label, entry.text).prefix()
        shown = painted(prefix) if wants_colours(1) else f"[{prefix}] "
        moment = datetime.fromtimestamp(entry.at_s).strftime("%H:%M:%S.%f")[:-3] + " " if given.times else ""
        text = f"{moment}{shown}{entry.text}"
    encoding = sink.encoding or "utf-8"
    sink.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
    if given.follow:
        sink.flush()


def _since(text: str) -> float:
    """A time, or a duration before now; anything else raises `argparse.ArgumentTypeError`."""
    if span := re.fullmatch(r"(\d{1,9}(?:\.\d+)?)([smhd]?)", text):
        return time.time() - float(span[1]) * _UNITS[span[2]]
    now = datetime.now()
    for form in ("%H:%M", "%H:%M:%S"):
        with contextlib.suppress(ValueError):
            clock = datetime.strptime(text, form)
            return now.replace(hour=clock.hour, minute=clock.minute, second=clock.second, microsecond=0).timestamp()
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a duration such as 10m nor a time such as 14:30"
        ) from None
