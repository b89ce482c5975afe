"""``skipper debug``: a prompt, or commands on the command line, for the actors that are parked at a breakpoint."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from skipper.commandline import FAILED, CommandParser
from skipper.control.api.join import visiting
from skipper.control.observe.debugger import GONE, PARKED, BreakpointReport, Debugger
from skipper.control.observe.program import parser_of, run
from skipper.control.observe.status_command import duration

HELP = """\
list [WHO ...]       list the actors that are parked (stopped at a breakpoint)
attach WHO           debug one actor: each line is a command of pdb; `detach` or Ctrl-D leaves it parked
cast COMMAND         run a command of pdb in all parked actors: cast p loss
select [WHO ...]     choose the actors of later `cast` and `continue` commands; without WHO: all
continue [WHO ...]   let the actors continue
quit                 leave; parked actors stay parked
WHO is the name of an actor, with or without a rank: trainer, trainer:3
"""


def parser(prog: str) -> CommandParser:
    """The parser of the command."""
    own = parser_of(
        prog,
        "Debug the actors of a running job that have stopped at a breakpoint(). Without -c it prompts for commands.",
        timeout_s=5.0,
        exit_codes={FAILED: "a command matched no actor, or there is none of that name"},
        notes=f"commands:\n{HELP}",
    )
    own.add_argument(
        "-c",
        "--command",
        dest="commands",
        action="append",
        metavar="COMMAND",
        help="run this command instead of prompting; repeat the flag for several",
    )
    return own


def main(argv: Sequence[str], *, prog: str = "skipper debug") -> int:
    """Debug the actors of a job; returns the exit code, 1 if a command matched no actor or was unknown."""
    return run(parser(prog), argv, _debug)


def _debug(given: argparse.Namespace) -> int:
    with visiting(given.job, timeout=given.timeout) as process:
        prompt = _Prompt(Debugger(process, timeout=given.timeout), sys.stdout.write)
        if given.commands is not None:
            for line in given.commands:
                if not prompt.do(line):
                    break
        else:
            prompt.do("list")
            prompt.run(_typed)
        return 1 if prompt.failed else 0


def _typed(prompt: str) -> str | None:
    try:
        return input(prompt)  # at a terminal, in a notebook, or from a pipe
    except EOFError:
        return None


class _Prompt:
    """Runs commands, one after another. ``failed`` says whether one of them matched no actor or was unknown."""

    def __init__(self, debugger: Debugger, say: Callable[[str], object]) -> None:
        self.failed = False
        self._debugger = debugger
        self._say = say
        self._selected: list[str] = []
        self._attached: BreakpointReport | None = None

    def run(self, read: Callable[[str], str | None]) -> None:
        """Run commands until there are no more; the end of a conversation with one actor does not end the prompt."""
        while True:
            attached = self._attached
            line = read("(skipper) " if attached is None else f"({attached.actor}) ")
            if line is None:
                self._say("\n")
                self._attached = None
            if line is None and attached is None:
                return
            if line is not None and not self.do(line):
                return

    def do(self, line: str) -> bool:
        """Run one command; False if it was the last."""
        if self._attached is not None:
            self._tell_attached(self._attached, line)
            return True
        word, _, rest = line.strip().partition(" ")
        who = rest.split()
        if word in ("quit", "q", "exit"):
            return False
        if word in ("list", "l"):
            self._list(who)
        elif word == "attach":
            self._attach(rest.strip())
        elif word == "cast" and rest.strip():
            self._cast(rest.strip(), self._selected)
        elif word == "select":
            self._selected = who
            self._list(who)
        elif word in ("continue", "c"):
            self._cast("continue", who or self._selected)
        elif word:
            self.failed = word not in ("help", "h", "?")
            self._say(HELP if not self.failed else f"there is no command {line.strip()!r}\n{HELP}")
        return True

    def _list(self, who: Sequence[str]) -> None:
        found = self._debugger.parked(who)
        for report in found:
            state = "" if report.state == PARKED else f" ({report.state})"
            self._say(
                f"{report.actor}  {report.function} ({report.file}:{report.line}), {duration(report.for_s)}{state}\n"
            )
            if report.code:
                self._say(f"    {report.code}\n")
        if not found:
            self._say("no actor has stopped at a breakpoint\n" if not who else f"not parked: {', '.join(who)}\n")

    def _meant(self, who: Sequence[str]) -> list[BreakpointReport]:
        found = self._debugger.parked(who)
        if not found:
            self.failed = True
            self._say(f"not parked: {', '.join(who)}\n" if who else "no actor has stopped at a breakpoint\n")
        return found

    def _attach(self, who: str) -> None:
        found = self._meant([who] if who else self._selected)
        if len(found) > 1:
            self.failed = True
            self._say(f"which one? {', '.join(report.actor for report in found)}\n")
        elif found:
            self._attached = found[0]
            self._say(f"> {found[0].file}({found[0].line}){found[0].function}()\n-> {found[0].code}\n")

    def _tell_attached(self, attached: BreakpointReport, line: str) -> None:
        if line.strip() == "detach":
            self._attached = None
            return
        said = self._debugger.cast(line, [attached])
        for report in said:
            self._say(report.output if report.output.endswith("\n") or not report.output else f"{report.output}\n")
        if not said or said[0].state == GONE:
            self._attached = None
            self._say(f"{attached.actor} goes on\n")
        elif said[0].state != PARKED:
            self._say(f"{attached.actor} is still {said[0].state}\n")

    def _cast(self, line: str, who: Sequence[str]) -> None:
        alike: dict[str, list[str]] = {}
        for report in self._debugger.cast(line, self._meant(who)):
            said = report.output.strip() or ("goes on" if report.state == GONE else report.state)
            alike.setdefault(said, []).append(report.actor)
        for said, actors in alike.items():
            self._say(f"{', '.join(actors)}:\n" + "".join(f"  {part}\n" for part in said.splitlines()))
