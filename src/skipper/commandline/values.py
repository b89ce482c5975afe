"""Types of arguments. Each raises `argparse.ArgumentTypeError`, with an explanation, for an invalid value."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from skipper.commandline.json_output import STDOUT


def whole(least: int, most: int = 10**12) -> Callable[[str], int]:
    """A type of argument: whole numbers from ``least`` to ``most``."""

    def parse(text: str) -> int:
        value = int(text) if re.fullmatch(r"[0-9]{1,12}", text) else -1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
        return value

    return parse


def number(*, zero: bool = False) -> Callable[[str], float]:
    """A type of argument: positive numbers below a million, and zero if it is allowed."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not (0 < value < 1e6 or (zero and value == 0)):
            raise argparse.ArgumentTypeError(f"{text!r} is {'neither 0 nor' if zero else 'not'} a positive number")
        return value

    return parse


def seconds(text: str) -> float:
    """A time span: a positive number of seconds."""
    try:
        span = float(text)
    except ValueError:
        span = -1.0
    if not 0 < span < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return span


def port_number(text: str) -> int:
    """A TCP port; 0 means a free one."""
    value = int(text) if re.fullmatch(r"[0-9]{1,5}", text) else -1
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"there is no port {text}")
    return value


def output_path(text: str) -> str:
    """A file to write, checked before anything is done; ``-`` is standard output."""
    target = Path(text)
    if text != STDOUT and target.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; name a file to write")
    if text != STDOUT and not target.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} cannot be written: there is no folder {target.parent}")
    return text
