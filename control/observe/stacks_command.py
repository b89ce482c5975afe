"""``skipper stacks``: where every thread of a running job is; equal stacks of several processes are shown once."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence

from skipper.commandline import FAILED, STDOUT, CommandParser, add_json, write_json
from skipper.control.observe.program import parser_of, run, take_words
from skipper.control.observe.stacks import Frame, ProcessStacks, job_stacks

_NAMES_SHOWN = 8


def parser(prog: str) -> CommandParser:
    """The parser of the command."""
    own = parser_of(
        prog,
        "Show where every thread of a running job is, the innermost call first. Processes that hang are inspected from "
        "outside, with py-spy if it is installed and permitted.",
        timeout_s=3.0,
        exit_codes={FAILED: "a process does not answer, or nothing has that name"},
    )
    own.add_argument(
        "who",
        nargs="*",
        metavar="WHO",
        help="name of a mesh of processes or actors, with or without a rank (trainer, trainer:3), or a pid; "
        "default: all",
    )
    own.add_argument("--native", action="store_true", help="use py-spy for all processes, and include C and C++ code")
    own.add_argument("-a", "--all", action="store_true", help="also show threads and calls of Skipper itself")
    add_json(own, "the stacks")
    return own


def main(argv: Sequence[str], *, prog: str = "skipper stacks") -> int:
    """Show the stacks of a job's processes; returns the exit code, 1 where one does not answer or none matches."""
    return run(parser(prog), argv, _show)


def _show(given: argparse.Namespace) -> int:
    take_words(given)
    found = job_stacks(given.job, native=given.native, timeout=given.timeout)
    chosen = [stacks for stacks in found if not given.who or any(map(stacks.is_meant_by, given.who))]
    if not chosen:
        known = ", ".join(f"{stacks.name} (pid {stacks.pid})" for stacks in found)
        sys.stderr.write(f"no process or mesh is called {' or '.join(given.who)}; there are: {known}\n")
        return 1
    write_json([dataclasses.asdict(stacks) for stacks in chosen], given.json)
    if given.json != STDOUT:
        sys.stdout.write(shown(chosen, with_runtime=given.all))
    return 1 if any(stacks.problem for stacks in chosen) else 0


def shown(found: Sequence[ProcessStacks], *, with_runtime: bool = False) -> str:
    """The stacks as text; processes whose stacks are the same share one paragraph."""
    groups: dict[str, list[ProcessStacks]] = {}
    for stacks in found:
        groups.setdefault(_body(stacks, with_runtime=with_runtime), []).append(stacks)
    return "\n".join(_title(members) + body for body, members in groups.items())


def _title(members: Sequence[ProcessStacks]) -> str:
    names = [f"{stacks.name} (pid {stacks.pid})" for stacks in members[:_NAMES_SHOWN]]
    more = f" and {len(members) - _NAMES_SHOWN} more" if len(members) > _NAMES_SHOWN else ""
    title = f"{', '.join(names)}{more}\n" if len(members) == 1 else f"{len(members)} alike: {', '.join(names)}{more}\n"
    doing = [f"  {thread.actor}: {thread.doing}\n" for stacks in members for thread in stacks.threads if thread.doing]
    rest = len(doing) - _NAMES_SHOWN
    return title + "".join(dict.fromkeys(doing[:_NAMES_SHOWN])) + (f"  and {rest} more\n" if rest > 0 else "")


def _body(stacks: ProcessStacks, *, with_runtime: bool) -> str:
    lines = [f"  {stacks.problem}"] if stacks.problem else []
    for thread in stacks.threads:
        lines += _thread(thread.name, thread.frames if with_runtime else thread.users_frames)
    if stacks.text:
        lines += [f"  {line}" for line in stacks.text.splitlines()]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _thread(name: str, frames: Sequence[Frame]) -> list[str]:
    if not frames:
        return []
    lines = [f"  {name}"]
    for frame in frames:
        lines.append(f"    {frame.function} ({frame.file}:{frame.line})")
        if frame.code:
            lines.append(f"      {frame.code}")
    return lines
