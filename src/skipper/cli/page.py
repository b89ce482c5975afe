"""The page of all tools, ``docs/cli.md``: the text of ``--help``, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from skipper.cli.main import GROUPS
from skipper.commandline import EXIT_CODES, CommandParser, Described, Option

_HEAD = """\
# All commands

<!-- made by `make cli` from the parsers: change those -->

`skipper TOOL --help`, or `skipper help TOOL`, prints the same text. If you mistype a tool or a flag, the error suggests
the one that you probably meant. `skipper --version` prints the version.

## Common flags and exit codes

| flag | meaning |
|---|---|
"""

_COMMON = ("--help", "--verbose")

_TAIL = """
Flags that several tools have, such as `--json [PATH]`, `--csv PATH`, `--quick`, `--timeout S`, `--job JOB`,
`--host ADDRESS` with `--port PORT`, `--secret-file FILE`, `--certs DIR` and `--insecure`, mean the same in all of them.
Long flags cannot be abbreviated.

| exit code | meaning |
|---|---|
"""

_COMPLETION = """
Each tool lists its other codes, and what 1 means there. Ctrl-C ends every tool with 130; a benchmark then
reports what it has measured so far. A server, such as `skipper host serve`, shuts down cleanly on SIGTERM.

`skipper completion bash`, `zsh` or `fish` prints a script that makes the shell complete tools, flags and values.
[skipper completion](#skipper-completion) says in which file to use it.
"""


def page(parsers: Mapping[str, CommandParser], commands: Mapping[str, Described]) -> str:
    """The whole page.

    Args:
        parsers: parsers of all tools, by name.
        commands: descriptions of all tools, by name.
    """
    first = next(iter(commands.values()))
    common = [option for option in first.options if option.names and option.names[-1] in _COMMON]
    parts = [_HEAD, *map(_row, common), _TAIL]
    parts += [f"| {code} | {_cell(meaning)} |\n" for code, meaning in sorted(EXIT_CODES.items())]
    parts.append(_COMPLETION)
    for group, words in GROUPS.items():
        parts.append(f"\n## {group[0].upper()}{group[1:]}\n")
        for word in words:
            parts += _tool(word, parsers[word], commands[word])
    return "".join(parts)


def _tool(word: str, parser: CommandParser, command: Described) -> Iterator[str]:
    yield f"\n### skipper {word}\n{_joined(command.description)}\n"
    yield f"\n```text\n{command.usage}\n```\n"
    yield from _options(command)
    for name, each in command.commands.items():
        yield f"\n#### skipper {word} {name}\n{_joined(each.description)}\n\n```text\n{each.usage}\n```\n"
        yield from _options(each)
    if parser.notes:
        yield f"\n```text\n{parser.notes.strip()}\n```\n"
    own = {code: said for code, said in parser.exit_codes.items() if EXIT_CODES.get(code) != said}
    if own:
        yield "\n| exit code | meaning |\n|---|---|\n"
        yield from (f"| {code} | {_cell(said)} |\n" for code, said in own.items())


def _options(command: Described) -> Iterator[str]:
    own = [option for option in command.options if not option.names or option.names[-1] not in _COMMON]
    if own:
        yield "\n| argument | meaning |\n|---|---|\n"
        yield from map(_row, own)


def _row(option: Option) -> str:
    return f"| `{_cell(option.usage)}` | {_cell(option.help)} |\n"


def _cell(text: str) -> str:
    return _joined(text).replace("|", "\\|").replace("<", "&lt;")


def _joined(text: str) -> str:
    return " ".join(text.split())
