"""``skipper doctor`` from the command line to the exit code."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dataplane.doctor.checks import Check, Examination, Verdict
from dataplane.doctor.examine import examine

if TYPE_CHECKING:
    from rich.table import Table

_STDOUT = "-"
_MARKS = {
    Verdict.OK: ("ok", "green"),
    Verdict.ABSENT: ("-", "dim"),
    Verdict.WARNING: ("warning", "yellow"),
    Verdict.PROBLEM: ("PROBLEM", "bold red"),
}
_WIDTH = 120

_EPILOG = """\
exit codes: 0 the data plane works, and so does what this machine has; 1 something that should work here does
not (a line says PROBLEM, and what to do); 2 bad arguments
"""


def main(argv: Sequence[str], *, prog: str = "skipper doctor") -> int:
    """Examine this machine and say what was found.

    Args:
        argv: The arguments, without the program's name.
        prog: What was typed before them.

    Returns:
        The exit code; ``--help`` lists them.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        description="What the data plane can use on this machine, and what to install or change for more.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("-J", "--json", metavar="PATH", help="write it as JSON; - prints it alone on standard output")
    parser.add_argument("--ucx-library", metavar="PATH", help="look at this libucp.so.0 instead of the wheel's")
    parser.add_argument(
        "--trial",
        action="store_true",
        help="let every usable backend move bytes between two processes (ucx then listens on the loopback meanwhile)",
    )
    try:
        given = parser.parse_args(list(argv))
        if given.json not in (None, _STDOUT) and not Path(given.json).absolute().parent.is_dir():
            parser.error(f"--json {given.json}: there is no such folder")
    except SystemExit as leave:
        return leave.code if isinstance(leave.code, int) else 0

    examination = examine(ucx_library=given.ucx_library, trials=given.trial)
    if given.json is not None:
        text = json.dumps(examination.to_dict(), indent=2) + "\n"
        if given.json == _STDOUT:
            sys.stdout.write(text)
        else:
            Path(given.json).write_text(text)
    _show(examination, stderr=given.json == _STDOUT)
    return 1 if examination.verdict is Verdict.PROBLEM else 0


def _show(examination: Examination, *, stderr: bool) -> None:
    from rich.console import Console

    console = Console(highlight=False, stderr=stderr)
    if not console.is_terminal:
        console.width = _WIDTH  # a pipe has none
    system = examination.facts["system"]
    console.print(f"{system['kernel']}, Python {system['python']}, {system['cores_usable']} cores", markup=False)
    console.print(_table(examination.checks))
    counts = [sum(check.verdict is verdict for check in examination.checks) for verdict in Verdict]
    told = dict(zip(Verdict, counts, strict=True))
    console.print(f"problems: {told[Verdict.PROBLEM]}, warnings: {told[Verdict.WARNING]}", markup=False)


def _table(checks: Sequence[Check]) -> "Table":
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("", "", "", "found, and what to do"):
        table.add_column(column, no_wrap=column == "", overflow="fold")
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
