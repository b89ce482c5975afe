"""The exit codes that mean the same for every command. A command lists its own in addition."""

from __future__ import annotations

from collections.abc import Mapping

DONE = 0
FAILED = 1
USAGE = 2
INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""

EXIT_CODES: Mapping[int, str] = {
    DONE: "success",
    FAILED: "failure, or a problem was found; standard error says what",
    USAGE: "bad arguments; nothing was started",
    INTERRUPTED: "interrupted by Ctrl-C",
}
