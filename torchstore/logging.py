"""`init_logging`: log records on standard output, for scripts that configure no logging of their own."""

from __future__ import annotations

import logging
import os
import sys

LEVEL_VARIABLE = "TORCHSTORE_LOG_LEVEL"
"""Environment variable with the name of a level; without it `init_logging` takes INFO."""


def init_logging() -> None:
    """Make the root logger write to standard output, at the level in TORCHSTORE_LOG_LEVEL and above.

    Without this call a process keeps the logging that it has: importing this package configures none. Calling it
    again only changes the level.

    Raises:
        ValueError: There is no level of that name.
    """
    named = os.environ.get(LEVEL_VARIABLE, "INFO").upper()
    level = logging.getLevelNamesMapping().get(named)
    if level is None:
        known = ", ".join(logging.getLevelNamesMapping())
        raise ValueError(f"{LEVEL_VARIABLE} is {named!r} and should be one of {known}")
    root = logging.getLogger()
    root.setLevel(level)
    if not any(getattr(handler, "stream", None) is sys.stdout for handler in root.handlers):
        root.addHandler(logging.StreamHandler(sys.stdout))
