"""``skipper doctor`` from the command line to the exit code."""

import argparse
import pwd
import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from skipper.commandline import FAILED, STDOUT, BadArgumentsError, CommandParser, add_json, run, whole, write_json
from skipper.dataplane.doctor.checks import Check, Examination, Verdict
from skipper.dataplane.doctor.examine import examine
from skipper.dataplane.doctor.exposure import Exposure, Item, expose

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_MARKS = {
    Verdict.OK: ("ok", "green"),
    Verdict.ABSENT: ("-", "dim"),
    Verdict.WARNING: ("warning", "yellow"),
    Verdict.PROBLEM: ("PROBLEM", "bold red"),
}
_WIDTH = 120
_MOST_PIDS = 4

_EXIT_CODES = {
    0: "the data plane works with all that this machine has; with --exposure: nothing is open that you did not ask for",
    1: "something that should work here does not (a line says PROBLEM, and what to do); with --exposure: something is "
    "open (a line says OPEN), or a process could not be examined",
    3: "with --exposure: no process of Skipper is running",
}


def parser(prog: str) -> CommandParser:
    """The parser of the command."""
    own = CommandParser(
        prog=prog,
        description="Show what the data plane can use on this machine, and what to install or change for more.",
        exit_codes=_EXIT_CODES,
    )
    add_json(own, "what was found")
    own.add_argument("--ucx-library", metavar="PATH", help="examine this libucp.so.0 instead of the wheel's")
    own.add_argument(
        "--trial",
        action="store_true",
        help="move bytes between two processes with every usable backend (ucx listens on 127.0.0.1 for that time)",
    )
    own.add_argument(
        "--exposure",
        action="store_true",
        help="show instead which sockets, memory and files of your running processes are open, and to whom",
    )
    own.add_argument(
        "--pid",
        type=whole(1),
        metavar="PID",
        action="append",
        help="with --exposure: only this process and its descendants; repeat the flag for several",
    )
    own.add_argument(
        "--asked",
        metavar="NAME",
        action="append",
        default=[],
        help="with --exposure: open on purpose: HOST:PORT, HOST:*, @NAME or a path; repeat the flag for several",
    )
    return own


def main(argv: Sequence[str], *, prog: str = "skipper doctor") -> int:
    """Examine this machine and say what was found.

    Args:
        argv: The arguments, without the program's name.
        prog: What was typed before them.

    Returns:
        The exit code; ``--help`` lists them.
    """
    return run(parser(prog), argv, lambda given: _do(given, prog), errors=(OSError,), status=FAILED)


def _do(given: argparse.Namespace, prog: str) -> int:
    if (given.pid or given.asked) and not given.exposure:
        raise BadArgumentsError("--pid and --asked go with --exposure")
    if given.exposure:
        return _look_for_exposure(given.pid, given.asked, given.json, prog)
    examination = examine(ucx_library=given.ucx_library, trials=given.trial)
    write_json(examination.to_dict(), given.json)
    _show(examination, stderr=given.json == STDOUT)
    return 1 if examination.verdict is Verdict.PROBLEM else 0


def _look_for_exposure(pids: Sequence[int] | None, asked: Sequence[str], where: str | None, prog: str) -> int:
    try:
        exposure = expose(pids, asked=asked)
    except ProcessLookupError as error:
        sys.stderr.write(f"{prog}: {error}\n")
        return 2
    write_json(exposure.to_dict(), where)
    _show_exposure(exposure, stderr=where == STDOUT)
    if not exposure.processes and not exposure.unseen:
        return 3
    return 1 if exposure.open or exposure.unseen else 0


def _show_exposure(exposure: Exposure, *, stderr: bool) -> None:
    console = _console(stderr=stderr)
    console.print(_exposure_table(exposure.items))
    unseen = f", not examined (of another user): {', '.join(map(str, exposure.unseen))}" if exposure.unseen else ""
    console.print(f"processes: {len(exposure.processes)}, open: {len(exposure.open)}{unseen}", markup=False)


def _console(*, stderr: bool) -> "Console":
    from rich.console import Console

    console = Console(highlight=False, stderr=stderr)
    if not console.is_terminal:
        console.width = _WIDTH  # a pipe has no width
    return console


def _empty_table(*columns: str) -> "Table":
    """A table without rows; only the last column wraps."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, no_wrap=column != columns[-1], overflow="fold")
    return table


def _exposure_table(items: Sequence[Item]) -> "Table":
    from rich.text import Text

    table = _empty_table("", "kind", "owner", "mode", "who may reach it", "what, and why")
    alike: dict[tuple[object, ...], list[Item]] = {}
    for item in items:  # open items have lines of their own
        name = "" if item.designed else item.name
        alike.setdefault((item.kind, item.uid, item.mode, item.reach, item.why, name), []).append(item)
    for first, *others in alike.values():
        word, style = ("ok", "green") if first.designed else ("OPEN", "bold red")
        mode = "-" if first.mode is None else f"{first.mode:04o}"
        more = f" and {len(others)} more" if others else ""
        pids = sorted({pid for item in (first, *others) for pid in item.pids})
        holders = f" (pid {', '.join(map(str, pids[:_MOST_PIDS]))}{', ...' if len(pids) > _MOST_PIDS else ''})"
        what = Text(f"{first.name}{more}{holders if pids else ''}: {first.why}")
        table.add_row(Text(word, style=style), first.kind, _name_of(first.uid), mode, str(first.reach), what)
    return table


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _show(examination: Examination, *, stderr: bool) -> None:
    console = _console(stderr=stderr)
    system = examination.facts["system"]
    console.print(f"{system['kernel']}, Python {system['python']}, {system['cores_usable']} cores", markup=False)
    console.print(_table(examination.checks))
    told = Counter(check.verdict for check in examination.checks)
    console.print(f"problems: {told[Verdict.PROBLEM]}, warnings: {told[Verdict.WARNING]}", markup=False)


def _table(checks: Sequence[Check]) -> "Table":
    from rich.text import Text

    table = _empty_table("", "", "", "found, and what to do")
    area = None
    for check in checks:
        word, style = _MARKS[check.verdict]
        found = Text(check.found)
        if check.advice:
            found.append(f"\n→ {check.advice}", style="cyan" if check.verdict is Verdict.OK else style)
        if check.area != area and area is not None:
            table.add_section()
        table.add_row("" if check.area == area else check.area, check.name, Text(word, style=style), found)
        area = check.area
    return table
