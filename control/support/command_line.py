"""What commands of ``skipper`` have in common: how arguments, and the errors that end them, become an exit code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

EXIT_CODES = """\
exit codes: 0 done; 1 it could not be done, and standard error says why; 2 bad arguments
"""


def run(
    parser: argparse.ArgumentParser,
    argv: Sequence[str],
    action: Callable[[argparse.Namespace], int],
    *,
    errors: tuple[type[Exception], ...],
    status: int,
) -> int:
    """Parse the arguments and do it.

    Args:
        parser: of this command.
        argv: the arguments, without the program's name.
        action: what to do with them; its result is the exit code.
        errors: are said on standard error, and end it with ``status``.
        status: see there.

    Returns:
        The exit code: that of ``action``, ``status``, 2 for bad arguments, 130 where it was interrupted.
    """
    try:
        given = parser.parse_args(list(argv))
    except SystemExit as leave:
        return leave.code if isinstance(leave.code, int) else 0
    try:
        return action(given)
    except errors as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read it has seen enough
        sys.stderr.close()
        return 0
