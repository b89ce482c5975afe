"""What the command lines of the benchmarks share: complaints as errors, and numbers in their ranges."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from skipper.benchmarks.errors import BenchmarkError, UsageError
from skipper.benchmarks.output import check_writable

__all__ = ["Parser", "number", "whole"]


class Parser(argparse.ArgumentParser):
    """Raises `UsageError` instead of exiting, so that every complaint takes the same way out."""

    def error(self, message: str) -> NoReturn:
        """Called by argparse."""
        raise UsageError(message)

    def read(self, argv: Sequence[str], *files: str) -> argparse.Namespace | int:
        """The arguments; or the exit code, where nothing is to run: ``--help`` or a complaint has been printed.

        Args:
            argv: What was typed, without the program's name.
            files: Names of the arguments that say where to write; each is tried before anything is measured.
        """
        try:
            given = self.parse_args(list(argv))
            for name in files:
                check_writable(getattr(given, name))
        except SystemExit as leave:  # argparse's, after --help
            return leave.code if isinstance(leave.code, int) else 0
        except BenchmarkError as error:
            print(f"{self.prog}: {error}", file=sys.stderr)
            return error.exit_code
        return given


def whole(least: int, most: int = 10**12) -> Callable[[str], int]:
    """A type of argument: whole numbers from ``least`` to ``most``."""

    def parse(text: str) -> int:
        value = int(text) if re.fullmatch(r"[0-9]{1,12}", text) else -1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
        return value

    return parse


def number(*, zero: bool = False) -> Callable[[str], float]:
    """A type of argument: positive numbers below a million, and zero where it is allowed."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not (0 < value < 1e6 or (zero and value == 0)):
            raise argparse.ArgumentTypeError(f"{text!r} is {'neither 0 nor' if zero else 'not'} a positive number")
        return value

    return parse
