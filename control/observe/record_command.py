"""``skipper record``: lists, shows and replays the records that ``skipper run`` keeps."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from skipper.commandline import (
    FAILED,
    STDOUT,
    BadArgumentsError,
    CommandParser,
    add_command,
    add_json,
    number,
    run,
    whole,
    write_json,
)
from skipper.control.model.errors import ControlError
from skipper.control.observe.log_lines import shown
from skipper.control.observe.record import Record, RecordedEvent, find_record, records, records_home
from skipper.control.observe.status import JobStatus
from skipper.control.observe.status_command import duration, view
from skipper.control.runtime.history import Event

_EVENTS = 40
_SPEED = 10.0
_LONGEST_WAIT_S = 2.0
_WIDTH = 140
_QUIET = ("process", "gone", "sync", "logs")
"""Kinds of events that only ``--all`` shows."""


def parser(prog: str) -> CommandParser:
    """The parser of the command."""
    own = CommandParser(
        prog=prog,
        description="Show the records that skipper run keeps of your runs; without a command, list them.",
        exit_codes={FAILED: "there is no such record, or it belongs to another user"},
    )
    add_json(own, "the list, or what the command shows,")
    commands = own.add_subparsers(metavar="COMMAND", dest="command")
    show = add_command(commands, "show", "show a run: how it ended, its errors, and where its threads were last")
    _add_folder(show)
    show.add_argument(
        "-n", "--events", type=whole(1), default=_EVENTS, metavar="N", help=f"number of events (default: {_EVENTS})"
    )
    show.add_argument(
        "-a", "--all", action="store_true", help="all events, including syncs and the start and end of processes"
    )
    add_json(show, "the whole record")
    replay = add_command(commands, "replay", "replay the status of the job from the beginning to the end of the run")
    _add_folder(replay)
    replay.add_argument(
        "--speed",
        type=number(),
        default=_SPEED,
        metavar="X",
        help=f"how many times faster than the run was (default: {_SPEED:g})",
    )
    replay.add_argument("--last", type=number(), metavar="S", help="only the last S seconds")
    return own


def _add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", nargs="?", metavar="FOLDER", help="folder of the record, or the name of its run (default: the latest)"
    )


def main(argv: Sequence[str], *, prog: str = "skipper record") -> int:
    """List, show or replay records; returns the exit code."""
    return run(parser(prog), argv, _act, errors=(ControlError, OSError), status=FAILED)


def _act(given: argparse.Namespace) -> int:
    word = given.json if given.command != "replay" else None
    if word is not None and word != STDOUT and "/" not in word and not word.endswith(".json"):
        if given.command is None:
            raise BadArgumentsError(
                f"--json takes {word!r} as its PATH: put the command before --json, or write PATH.json"
            )
        if given.folder is None:  # the word after --json is the run, as with the other tools
            given.folder, given.json = word, STDOUT
    if given.command == "show":
        return _show(find_record(given.folder), given)
    if given.command == "replay":
        return _replay(find_record(given.folder), given)
    return _list(given)


def _list(given: argparse.Namespace) -> int:
    found = records(records_home())
    if given.json is not None:
        write_json(
            [{**record.about, "folder": str(record.folder), "runs": record.is_running} for record in found], given.json
        )
        if given.json == STDOUT:
            return 0
    for record in found:
        sys.stdout.write(
            f"{_moment(record.began_s)}  {_plain(record.name):<20}  {_plain(record.outcome):<40}  {record.folder}\n"
        )
    if not found:
        sys.stderr.write(f"there are no records in {records_home()}; skipper run makes them\n")
    return 0


def _show(record: Record, given: argparse.Namespace) -> int:
    status, events, stacks = record.last_status(), record.events(), record.stacks()
    if given.json is not None:
        write_json(
            {
                "about": record.about,
                "status": None if status is None else status.to_dict(),
                "events": [dataclasses.asdict(event) for event in events],
                "stacks": [dataclasses.asdict(each) for each in stacks],
            },
            given.json,
        )
        if given.json == STDOUT:
            return 0
    out = sys.stdout.write
    for line in _head(record, events):
        out(f"{line}\n")
    if status is not None:
        out(f"\nat the last look, {_clock(status.taken_s)}:\n")
        _print_status(status, events)
    wanted = [event for event in events if given.all or event.kind not in _QUIET]
    left_out = 0 if given.all else max(len(wanted) - given.events, 0)
    if wanted:
        more = f", the last {given.events} of {len(wanted)}" if left_out else ""
        out(f"\nwhat happened{more}:\n")
    tracebacks = {_kind_of(event): event.traceback for event in events if event.traceback and event.kind == "error"}
    for event in wanted[left_out:]:
        # Errors that are alike have one traceback: it is shown with the first of them.
        trace = tracebacks.pop(_kind_of(event), "") if event.kind == "error" else event.traceback
        for line in _lines(dataclasses.replace(event, traceback=trace)):
            out(f"{line}\n")
    if stacks:
        last = stacks[-1]
        why = f", since {last.why}" if last.why else ""
        out(f"\nwhere every thread was at {_clock(last.at_s)}{_plain(why)}:\n{_plain(last.text)}")
    return 0


def _head(record: Record, events: Sequence[RecordedEvent]) -> Iterator[str]:
    about: Mapping[str, Any] = record.about
    ended_s = about.get("ended_s")
    last_s = ended_s if isinstance(ended_s, float) else max((event.at_s for event in events), default=record.began_s)
    took = duration(last_s - record.began_s)
    command = about.get("command")
    yield f"{_plain(record.name)} {_plain(record.outcome)}"
    if isinstance(command, list):
        yield f"  command  {_plain(' '.join(map(str, command)))}"
    yield f"  folder   {_plain(str(about.get('cwd', '')))} on {_plain(str(about.get('hostname', '')))}"
    yield f"  time     from {_moment(record.began_s)}, for {took}"
    for event in events:
        if event.kind == "logs":
            yield f"  output   {_plain(event.message)} (skipper logs --job {_plain(event.message.rpartition('-')[2])})"
    yield f"  record   {record.folder}"


def _replay(record: Record, given: argparse.Namespace) -> int:
    from rich.console import Console

    events, last = record.events(), record.last_status()
    begin_s = float("-inf") if given.last is None or last is None else last.taken_s - given.last
    is_screen = Console().is_terminal
    before: JobStatus | None = None
    for status in record.statuses():
        if status.taken_s < begin_s:
            continue
        if before is not None:
            time.sleep(min(max(status.taken_s - before.taken_s, 0) / given.speed, _LONGEST_WAIT_S))
        if is_screen:
            Console().clear()
        sys.stdout.write(f"{_moment(status.taken_s)}\n")
        _print_status(status, [event for event in events if event.at_s <= status.taken_s], before)
        for event in events:
            if begin_s < event.at_s <= status.taken_s:
                sys.stdout.write("".join(f"{line}\n" for line in _lines(event, with_traceback=False)))
        sys.stdout.flush()
        begin_s, before = status.taken_s, status
    rest = [event for event in events if event.at_s > begin_s]
    sys.stdout.write("".join(f"{line}\n" for event in rest for line in _lines(event)))
    return 0


def _print_status(status: JobStatus, events: Sequence[RecordedEvent], before: JobStatus | None = None) -> None:
    """As `skipper status` does, with the deaths until then."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH
    console.print(view(_with_deaths(status, events), before))


def _with_deaths(status: JobStatus, events: Sequence[RecordedEvent]) -> JobStatus:
    """The status with the parts of it that the record keeps elsewhere."""
    deaths = [Event(event.at_s, _plain(event.who), _plain(event.message)) for event in events if event.kind == "death"]
    script, *others = status.processes
    if script.report is None:
        return status
    script = dataclasses.replace(script, report=dataclasses.replace(script.report, deaths=deaths))
    return dataclasses.replace(status, processes=[script, *others])


def _kind_of(event: RecordedEvent) -> tuple[object, object]:
    return event.more.get("error"), event.more.get("place")


def _lines(event: RecordedEvent, *, with_traceback: bool = True) -> Iterator[str]:
    count = event.more.get("count")
    times = f" [x{count}]" if isinstance(count, int) and count > 1 else ""
    first, *others = _plain(event.message).splitlines() or [""]
    yield f"{_clock(event.at_s)}  {event.kind:<9}  {_plain(event.who)}: {first}{times}"
    for line in [*others, *(_plain(event.traceback).splitlines() if with_traceback else ())]:
        yield f"    | {line}"


def _plain(text: str) -> str:
    """Text of actors, made safe for a terminal."""
    return "\n".join(shown(line.encode("utf-8", "replace")) for line in text.split("\n"))


def _moment(at_s: float) -> str:
    return datetime.fromtimestamp(at_s).strftime("%Y-%m-%d %H:%M:%S")


def _clock(at_s: float) -> str:
    return datetime.fromtimestamp(at_s).strftime("%H:%M:%S.%f")[:-3]
