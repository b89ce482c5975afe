"""What the command lines of the benchmarks share: complaints as errors, and numbers in their ranges."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import NoReturn

from benchmarks.errors import UsageError

__all__ = ["Parser", "number", "whole"]


class Parser(argparse.ArgumentParser):
    """Raises `UsageError` instead of exiting, so that every complaint takes the same way out."""

    def error(self, message: str) -> NoReturn:
        """Called by argparse."""
        raise UsageError(message)


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
