"""A terminal: a pty, and what stands on its screen once the few sequences that are used here have been obeyed."""

import codecs
import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_SEQUENCE = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|[A-Z78])|.", re.DOTALL)
_BEGUN = re.compile(r"\x1b(?:\[[0-9;?]*)?\Z")


class Screen:
    """Rows of letters, all that have ever scrolled off included.

    Args:
        columns: of a row.
        wraps: whether what is longer goes on in the next row; else it is an error.
    """

    def __init__(self, columns: int, *, wraps: bool = False) -> None:
        self.rows = [""]
        self._columns = columns
        self._wraps = wraps
        self._begun = ""
        self._colours = ""
        self._colours_of: dict[tuple[int, int], str] = {}
        self._row = self._column = 0
        self._saved = (0, 0)

    def feed(self, text: str) -> None:
        text = self._begun + text
        begun = _BEGUN.search(text)  # a sequence may come in two pieces
        end = len(text) if begun is None else begun.start()
        self._begun = text[end:]
        for found in _SEQUENCE.findall(text[:end]):
            self._obey(found)

    def _obey(self, token: str) -> None:
        if token == "\r":
            self._column = 0
        elif token in ("\n", "\x1bD"):
            self._row += 1
        elif token == "\x1bE":
            self._row, self._column = self._row + 1, 0
        elif token == "\x1b[A":
            self._row -= 1
        elif token == "\x1b7":
            self._saved = self._row, self._column
        elif token == "\x1b8":
            self._row, self._column = self._saved
        elif token == "\x1b[J":
            del self.rows[self._row + 1 :]
            self.rows[self._row] = self.rows[self._row][: self._column]
        elif token.startswith("\x1b["):
            assert token.endswith("m"), f"unknown sequence {token!r}"
            self._colours = "" if token in ("\x1b[m", "\x1b[0m") else self._colours + token
        else:
            assert token.isprintable(), f"unknown letter {token!r}"
            self._put(token)
        self.rows += [""] * (self._row + 1 - len(self.rows))

    def _put(self, letter: str) -> None:
        if self._wraps and self._column == self._columns:
            self._row, self._column = self._row + 1, 0
            self.rows += [""] * (self._row + 1 - len(self.rows))
        assert self._column < self._columns, "a row is too long"
        row = self.rows[self._row].ljust(self._column)
        self.rows[self._row] = row[: self._column] + letter + row[self._column + 1 :]
        self._colours_of[self._row, self._column] = self._colours
        self._column += 1

    def coloured(self) -> str:
        """All rows as text with the sequences of their colours, and no others."""
        return "\n".join(self._coloured(number, row) for number, row in enumerate(self.rows))

    def _coloured(self, number: int, row: str) -> str:
        text, before = "", ""
        for column, letter in enumerate(row):
            colours = self._colours_of.get((number, column), "")
            if colours != before:
                text, before = f"{text}\x1b[0m{colours}", colours
            text += letter
        return f"{text}\x1b[0m"


class Terminal:
    """A process whose standard streams are a terminal."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        columns: int = 100,
        wraps: bool = False,
        cwd: Path | None = None,
    ) -> None:
        self.screen = Screen(columns, wraps=wraps)
        self.text = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self.ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=dict(env), cwd=cwd, start_new_session=True
        )
        os.close(theirs)

    def read_until(self, condition: Callable[[], bool], timeout: float) -> None:
        """Take what the process writes until the condition holds."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"not within {timeout} s:\n{self.text!r}"
            if not self._read(0.1) and self.process.poll() is not None:
                assert condition(), f"ended before that:\n{self.text!r}"

    def run(self, timeout: float) -> int:
        """Take all that it writes; its exit code."""
        self.read_until(lambda: self.process.poll() is not None, timeout)
        while self._read(0):
            pass
        return self.process.wait(timeout)

    def _read(self, timeout: float) -> bool:
        if not select.select([self.ours], [], [], timeout)[0]:
            return False
        try:
            chunk = os.read(self.ours, 1 << 16)
        except OSError:  # nobody has it open any more
            return False
        text = self._decoder.decode(chunk)  # a letter may come in two pieces
        self.text += text
        self.screen.feed(text)
        return bool(chunk)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.ours)


def in_terminal(script: Path, *arguments: str, **variables: str) -> Terminal:
    """Run a script in a terminal."""
    kept = {name: value for name, value in os.environ.items() if name not in ("CI", "NO_COLOR", "SKIPPER_PROGRESS")}
    return Terminal([sys.executable, str(script), *arguments], {**kept, "TERM": "xterm", **variables})
