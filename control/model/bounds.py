"""Checks of numbers and flags that users pass, before anything is done with them."""

from __future__ import annotations

from typing import Any

LONGEST_S = 1e9
"""Thirty years: a longer bound is reduced to this one, since the system and gRPC cannot wait longer."""

MAX_PROCESSES = 4_194_304
"""Processes that a host can have: ``PID_MAX_LIMIT`` of Linux."""


def check_seconds(name: str, value: Any) -> float:
    """A time in seconds, at most `LONGEST_S`; below 0 the time has passed.

    Raises:
        TypeError: it is no number.
        ValueError: it is not a number (NaN).
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is a number of seconds, not {_shown(value)}")
    if value != value:
        raise ValueError(f"{name} is a number of seconds, not {value}")
    return max(min(value, LONGEST_S), -LONGEST_S)


def check_optional_seconds(name: str, value: Any) -> float | None:
    """`check_seconds`, where None is no bound."""
    return None if value is None else check_seconds(name, value)


def check_count(name: str, value: Any, least: int, most: int | None = None) -> int:
    """A whole number from ``least`` to ``most``.

    Raises:
        TypeError: it is no integer.
        ValueError: it is out of that range.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is a whole number, not {_shown(value)}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {_shown(value)}")
    if most is not None and value > most:
        raise ValueError(f"{name} must be at most {most}, not {_shown(value)}")
    return value


def check_port(name: str, value: Any) -> int:
    """A port to listen on; 0 is any that is free.

    Raises:
        TypeError: it is no integer.
        ValueError: it is not from 0 to 65535.
    """
    return check_count(name, value, 0, 0xFFFF)


def check_flag(name: str, value: Any) -> bool:
    """True or False; anything else was meant for another parameter, and often counts as true.

    Raises:
        TypeError: it is neither.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} is True or False, not {_shown(value)}")
    return value


def _shown(value: object) -> str:
    """A value for people, of any length."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
