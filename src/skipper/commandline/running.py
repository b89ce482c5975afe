"""How arguments, and the errors that end a command, become an exit code."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from skipper.commandline.exit_codes import DONE, INTERRUPTED, USAGE
from skipper.commandline.parser import BadArgumentsError

_PACKAGE = "skipper"


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
        parser: parser of this command.
        argv: the arguments, without the program's name.
        action: what to do with them; its result is the exit code.
        errors: printed to standard error; they end the command with ``status``.
        status: the exit code for ``errors``.

    Returns:
        The exit code: that of ``action``, ``status``, 2 for bad arguments, 130 if it was interrupted.
    """
    try:
        given = parser.parse_args(list(argv))
    except SystemExit as leave:
        return leave.code if isinstance(leave.code, int) else DONE
    say_more(given)
    try:
        exit_code = action(given)
        sys.stdout.flush()
    except BadArgumentsError as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return USAGE
    except BrokenPipeError:
        return reader_is_gone()
    except errors as error:
        tell_origin()
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return status
    except KeyboardInterrupt:
        return INTERRUPTED
    return exit_code


def say_more(given: argparse.Namespace) -> None:
    """With ``--verbose``, show the log of this package on standard error."""
    if getattr(given, "verbose", False):
        import logging  # imported only when needed

        logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s: %(message)s")
        logging.getLogger(_PACKAGE).setLevel(logging.DEBUG)


def is_verbose() -> bool:
    """Whether ``--verbose`` was given."""
    import logging

    return logging.getLogger(_PACKAGE).level == logging.DEBUG


def tell_origin() -> None:
    """With ``--verbose``, print the traceback of the error that is being handled."""
    if is_verbose():
        import traceback

        traceback.print_exc()


def reader_is_gone() -> int:
    """Write nothing more to standard output, which its reader, such as ``head``, has closed; returns the exit code."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    return DONE
