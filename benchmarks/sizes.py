"""Sizes in bytes as people type them: ``4K``, ``4800K``, ``64M``, ``1G``, in powers of two."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable

from skipper.benchmarks.errors import UsageError

__all__ = ["SWEEP", "binary_size", "format_size", "parse_size", "size_argument", "size_up_to"]

_SHIFTS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_SIZE = re.compile(r"(?P<count>[0-9]{1,15})(?P<suffix>[KMGT]?)", re.IGNORECASE | re.ASCII)

SWEEP: tuple[int, ...] = tuple(1 << shift for shift in range(12, 31, 2))
"""What ``--all`` walks through: 4K to 1G, each four times the one before."""


def parse_size(text: str) -> int:
    """Read a size: a whole number of bytes, or of ``K`` = 2**10, ``M`` = 2**20, ``G`` = 2**30, ``T`` = 2**40.

    Raises:
        UsageError: ``text`` is not of that form, or is zero.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not a size; write a number of bytes, or 4K, 64M, 1G (powers of two)")
    nbytes = int(match["count"]) << _SHIFTS[match["suffix"].upper()]
    if nbytes == 0:
        raise UsageError(f"{text!r} is no size to transfer; it must be at least one byte")
    return nbytes


def size_argument(text: str) -> int:
    """`parse_size` as a type of argument."""
    try:
        return parse_size(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def size_up_to(most: int) -> Callable[[str], int]:
    """A type of argument: a size that is not larger."""

    def parse(text: str) -> int:
        nbytes = size_argument(text)
        if nbytes > most:
            raise argparse.ArgumentTypeError(f"{text} is too large; {format_size(most)} at most")
        return nbytes

    return parse


def binary_size(nbytes: int) -> str:
    """A size as names of rows have it: ``64MiB``, ``100B``."""
    text = format_size(nbytes)
    return f"{text}iB" if text[-1].isalpha() else f"{text}B"


def format_size(nbytes: int) -> str:
    """Print a size exactly, in the largest unit that divides it: the inverse of `parse_size`."""
    for suffix in "TGMK":
        if nbytes and nbytes % (1 << _SHIFTS[suffix]) == 0:
            return f"{nbytes >> _SHIFTS[suffix]}{suffix}"
    return str(nbytes)
