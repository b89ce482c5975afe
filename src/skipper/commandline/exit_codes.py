"""The exit codes that mean the same for every command. A command names those that it has besides."""

from __future__ import annotations

from collections.abc import Mapping

DONE = 0
FAILED = 1
USAGE = 2
INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""

EXIT_CODES: Mapping[int, str] = {
    DONE: "all is well",
    FAILED: "it could not be done, or something is not as it should be; standard error says what",
    USAGE: "bad arguments; nothing was begun",
    INTERRUPTED: "interrupted by Ctrl-C",
}
