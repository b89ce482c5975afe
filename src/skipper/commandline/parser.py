"""The parser of every command: no abbreviated options, exit codes below the help, and hints for mistyped words."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, Protocol

from skipper.commandline.description import Described, described
from skipper.commandline.exit_codes import EXIT_CODES, USAGE

_WIDTH = 100
_UNKNOWN = re.compile(r"unrecognized arguments: (.*)", re.DOTALL)
_NO_CHOICE = re.compile(r"invalid choice: '(?P<given>.*)' \(choose from (?P<choices>.*)\)", re.DOTALL)


class BadArgumentsError(ValueError):
    """The arguments contradict each other; the command ends with exit code 2."""


class CommandParser(argparse.ArgumentParser):
    """A parser of one command, or of one of its sub-commands.

    Args:
        prog: what was typed before the arguments.
        description: what the command does.
        exit_codes: its own, in addition to the common ones; or common ones whose meaning here is more exact.
        notes: shown below the flags, above the exit codes; line breaks stay.
        more: as of `argparse.ArgumentParser`.
    """

    def __init__(
        self,
        *,
        prog: str | None = None,
        description: str | None = None,
        exit_codes: Mapping[int, str] | None = None,
        notes: str = "",
        **more: Any,
    ) -> None:
        self.exit_codes = dict(sorted({**EXIT_CODES, **(exit_codes or {})}.items()))
        self.notes = notes
        codes = [_indented(f"  {code:<4} {meaning}", 7) for code, meaning in self.exit_codes.items()]
        super().__init__(
            prog=prog,
            description=None if description is None else _indented(description, 0),
            epilog="\n\n".join(filter(None, (notes.strip(), "\n".join(["exit codes:", *codes])))),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **more,
        )
        self.add_argument(
            "-v",
            "--verbose",
            action="store_true",
            default=argparse.SUPPRESS,  # before a sub-command, it also applies to that
            help="print more to standard error: the log, and the tracebacks of errors",
        )

    def error(self, message: str) -> NoReturn:
        """End the process, with what is wrong in one line; called by argparse."""
        self.exit(USAGE, f"{self.prog}: {self.explained(message)}\n")

    def explained(self, message: str) -> str:
        """An error message of argparse, with what was probably meant and where to read more."""
        return f"{message}{self._guess(message)}; see {self.prog} --help"

    def _guess(self, message: str) -> str:
        if unknown := _UNKNOWN.fullmatch(message):
            known = set(_options_of(described(self)))
            mistyped = (word.partition("=")[0] for word in unknown[1].split() if word.startswith("--"))
            return "".join(did_you_mean(word, known) for word in mistyped)
        if choice := _NO_CHOICE.search(message):
            return did_you_mean(choice["given"], re.findall(r"[\w.:-]+", choice["choices"]))
        return ""


class TakesCommands(Protocol):
    """What `argparse.ArgumentParser.add_subparsers` returns."""

    def add_parser(self, name: str, **how: Any) -> CommandParser:
        """Add a sub-command."""


def add_command(
    commands: TakesCommands, name: str, summary: str, *, exit_codes: Mapping[int, str] | None = None
) -> CommandParser:
    """Add a sub-command; ``summary`` appears in the list of sub-commands and above its own help."""
    return commands.add_parser(
        name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", exit_codes=exit_codes
    )


def _indented(text: str, columns: int) -> str:
    return textwrap.fill(text, _WIDTH, subsequent_indent=" " * columns)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`` (did you mean ...?)`` with the words of ``known`` that have a similar spelling; empty if there are none."""
    import difflib  # only needed after a mistake

    near = difflib.get_close_matches(word, sorted(known), n=2, cutoff=0.7)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def _options_of(parser: Described) -> Iterable[str]:
    for option in parser.options:
        yield from option.names
    for command in parser.commands.values():
        yield from _options_of(command)
