"""The benchmark programs as a user runs them, for the tests: started, spoken to, and read."""

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from skipper.benchmarks.report import Report

ROOT = Path(__file__).resolve().parents[2]
BW = [sys.executable, "-m", "skipper.benchmarks.bandwidth"]
SKIPPER = [sys.executable, "-m", "skipper.cli.main"]
TOKEN = "the-token-of-this-test"
QUICK = ["-n", "4", "-w", "1"]
LIMIT_S = 40

Start = Callable[..., subprocess.Popen[str]]


def environment(token: str | None) -> dict[str, str]:
    """Of a program; without what would flush its output for it."""
    kept = {key: value for key, value in os.environ.items() if key not in ("SKIPPER_BW_TOKEN", "PYTHONUNBUFFERED")}
    return kept if token is None else {**kept, "SKIPPER_BW_TOKEN": token}


def bw(*argv: str, token: str | None = None, program: list[str] = BW) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*program, *argv], cwd=ROOT, env=environment(token), capture_output=True, text=True, timeout=LIMIT_S
    )


def rows(report: str) -> list[dict[str, Any]]:
    """The rows of a report that has the documented shape."""
    Report.from_json(report)
    return list(json.loads(report)["results"])


class Terminal:
    """A terminal for standard error: on one, a client says when each row is there."""

    def __init__(self) -> None:
        self.ours, self.theirs = os.openpty()
        self.said = ""

    def wait_for(self, word: str) -> None:
        while word not in self.said:
            self.said += os.read(self.ours, 4096).decode()

    def rest(self) -> str:
        """Everything that was said, once the program has ended."""
        self._hang_up()
        with contextlib.suppress(OSError):  # EIO is how a terminal says that nobody is left
            while more := os.read(self.ours, 4096):
                self.said += more.decode()
        return self.said

    def close(self) -> None:
        self._hang_up()
        os.close(self.ours)

    def _hang_up(self) -> None:
        if self.theirs >= 0:
            os.close(self.theirs)
            self.theirs = -1


def printed_command(server: subprocess.Popen[str]) -> tuple[str, str, list[str]]:
    """Token, address and flags of the client command that a server prints."""
    assert server.stdout is not None
    for line in server.stdout:
        found = re.match(r"\s+SKIPPER_BW_TOKEN=(\S+) .*?(127\.0\.0\.1:\d+)(.*)", line)
        if found:
            return found[1], found[2], found[3].split()
    raise AssertionError("the server printed no client command")


def heard(server: subprocess.Popen[str]) -> str:
    """The next line that a server logs."""
    assert server.stderr is not None
    return server.stderr.readline()
