"""``skipper completion``: a script that makes a shell complete what is typed after ``skipper``.

The scripts are files, made from all parsers by `skipper.cli.generate`: a shell reads one of them when it starts.
Neither that nor the completion of a word imports a tool.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from skipper.commandline import DONE, FAILED, CommandParser, run

__all__ = ["FOLDER", "SHELLS", "main", "parser"]

FOLDER = Path(__file__).with_name("completions")
SHELLS = {"bash": "skipper.bash", "zsh": "_skipper", "fish": "skipper.fish"}
"""Shells, and the names that such a file has in the shells' own folders of completions."""

_NOTES = """\
bash: eval "$(skipper completion bash)"      in ~/.bashrc
zsh:  eval "$(skipper completion zsh)"       in ~/.zshrc, after compinit
fish: skipper completion fish | source       in ~/.config/fish/config.fish
"""


def parser(prog: str) -> CommandParser:
    """The parser of the command."""
    own = CommandParser(
        prog=prog, description="Print the script that makes a shell complete tools, flags and values.", notes=_NOTES
    )
    own.add_argument("shell", choices=tuple(SHELLS), help="the shell to complete for")
    return own


def main(argv: Sequence[str], *, prog: str = "skipper completion") -> int:
    """Print the script; returns the exit code."""
    return run(parser(prog), argv, lambda given: _print(given.shell), errors=(OSError,), status=FAILED)


def _print(shell: str) -> int:
    sys.stdout.write((FOLDER / SHELLS[shell]).read_text(encoding="utf-8"))
    return DONE
