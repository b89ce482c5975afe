"""The arguments of a parser, as plain data: for pages, for completion in shells, and for hints."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Option:
    """A flag, or a positional argument.

    Attributes:
        names: how it is written, ``("-s", "--size")``; none for a positional argument.
        value: the name of its value, ``""`` for a flag without one.
        is_optional: whether the value, or the positional argument, may be left out.
        is_repeated: whether more than one value may follow.
        is_required: whether it has to be given.
        choices: the only values that it takes, if they are listed.
        help: what it does.
        action: argparse's own.
    """

    names: tuple[str, ...]
    value: str
    is_optional: bool
    is_repeated: bool
    is_required: bool
    choices: tuple[str, ...]
    help: str
    action: argparse.Action

    @property
    def usage(self) -> str:
        """How it is typed: ``-J, --json [PATH]``."""
        value = f"{self.value} ..." if self.is_repeated else self.value
        value = f"[{value}]" if value and self.is_optional else value
        return " ".join(filter(None, (", ".join(self.names), value)))


@dataclass(slots=True)
class Described:
    """A command, and those below it.

    Attributes:
        prog: what is typed before its arguments.
        description: what it does.
        epilog: the text below the flags.
        groups: headings, and the arguments below each.
        commands: its sub-commands, by name.
    """

    prog: str
    description: str
    epilog: str
    groups: dict[str, list[Option]] = field(default_factory=dict)
    commands: dict[str, Described] = field(default_factory=dict)

    @property
    def options(self) -> list[Option]:
        """All its arguments."""
        return [option for options in self.groups.values() for option in options]

    @property
    def usage(self) -> str:
        """How it is typed, with only the flags that it needs."""
        needed = [option.usage for option in self.options if option.names and option.is_required]
        positional = [option.usage for option in self.options if not option.names]
        return " ".join([self.prog, "[OPTIONS]", *needed, *positional, *(["COMMAND ..."] if self.commands else [])])


def described(parser: argparse.ArgumentParser) -> Described:
    """The arguments of a parser.

    This formats its help with a formatter that keeps what it gets, since argparse makes nothing else public.
    """
    found = Described(parser.prog, parser.description or "", parser.epilog or "")

    class HelpRecorder(argparse.HelpFormatter):
        _heading = ""

        def start_section(self, heading: str | None) -> None:
            self._heading = heading or ""

        def end_section(self) -> None:
            self._heading = ""

        def add_text(self, text: str | None) -> None:
            pass

        def add_usage(self, *_: Any, **__: Any) -> None:
            pass

        def add_arguments(self, actions: Iterable[argparse.Action]) -> None:
            for action in actions:
                if isinstance(action.choices, dict):  # the sub-commands
                    found.commands.update({name: described(each) for name, each in action.choices.items()})
                elif action.help != argparse.SUPPRESS:
                    found.groups.setdefault(self._heading, []).append(_option(parser, action))

        def format_help(self) -> str:
            return ""

    usual, parser.formatter_class = parser.formatter_class, HelpRecorder
    try:
        parser.format_help()
    finally:
        parser.formatter_class = usual
    return found


def _option(parser: argparse.ArgumentParser, action: argparse.Action) -> Option:
    choices = tuple(map(str, action.choices or ()))
    metavar = action.metavar or ("|".join(choices) if choices else action.dest.upper())
    told = {**vars(action), "prog": parser.prog}
    return Option(
        names=tuple(action.option_strings),
        value="" if action.nargs == 0 else metavar if isinstance(metavar, str) else " ".join(metavar),
        is_optional=action.nargs in ("?", "*", argparse.REMAINDER),
        is_repeated=action.nargs in ("*", "+", argparse.REMAINDER),
        is_required=action.required,
        choices=choices,
        help=(action.help or "") % told,
        action=action,
    )


def walk(command: Described) -> Iterator[Described]:
    """The command and all below it."""
    yield command
    for each in command.commands.values():
        yield from walk(each)
