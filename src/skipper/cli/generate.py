"""Makes files from the parsers of all tools: the page ``docs/cli.md``, and the scripts for completion in shells.

``python -m skipper.cli.generate`` writes them; with ``--check`` it compares. It needs the repository, and imports all
tools.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

from skipper.cli.completion import FOLDER, SHELLS
from skipper.cli.main import TOOLS
from skipper.cli.page import page
from skipper.cli.shells import SCRIPTS
from skipper.commandline import DONE, FAILED, CommandParser, described, run
from skipper.commandline.description import Described

PAGE = Path(__file__).resolve().parents[3] / "docs" / "cli.md"


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m skipper.cli.generate") -> int:
    """Write the files, or compare them; the exit code is 1 if one differs."""
    parser = CommandParser(prog=prog, description="Write the page of all tools, and the scripts for completion.")
    parser.add_argument("--check", action="store_true", help="compare with the files, and write nothing")
    arguments = sys.argv[1:] if argv is None else argv
    return run(parser, arguments, lambda given: _make(is_check=given.check), errors=(OSError,), status=FAILED)


def tools() -> dict[str, CommandParser]:
    """The parser of every tool, by its name."""
    return {name: import_module(tool.module).parser(f"skipper {name}") for name, tool in TOOLS.items()}


def files(parsers: Mapping[str, CommandParser]) -> dict[Path, str]:
    """The contents of the files, by path."""
    commands: dict[str, Described] = {name: described(parser) for name, parser in parsers.items()}
    made = {FOLDER / SHELLS[shell]: script(commands) for shell, script in SCRIPTS.items()}
    return {PAGE: page(parsers, commands), **made}


def _make(*, is_check: bool) -> int:
    exit_code = DONE
    for path, text in files(tools()).items():
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        if is_check:
            sys.stderr.write(f"{path.name} is not what the parsers say; run make cli\n")
            exit_code = FAILED
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
