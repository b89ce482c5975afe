"""What a script's terminal shows while its actors print more than anybody can read.

    python -m tests.control.observe.flood --actors 1000 --processes 16 --lines 100 --seconds 20

Of each line it is known what became of it: it was shown, another one stands for it, or it was dropped and counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from tests.control.conftest import REPOSITORY
from tests.control.observe.terminal import Terminal

_SHOWN = re.compile(r"^\[(?P<prefix>(?!logs\])[^\]]+)\] (?P<text>.*)$")
_ALIKE = re.compile(r" x(?P<same>\d+)$| and (?P<others>\d+) alike$")
_BEAT = re.compile(r"^the script: beat (?P<number>\d+) at (?P<at>[\d.]+)$")


@dataclass(frozen=True)
class FloodReport:
    """What was seen.

    Attributes:
        actors: that printed.
        printed: lines, as the actors count them.
        shown: lines in the terminal.
        folded: lines that another one stands for.
        dropped: lines, as the script counts them.
        told: how many lines the terminal says were dropped.
        beats: lines of the script itself, whole and in their order.
        beats_printed: of so many.
        beat_ms: how long the last of ten of them took, sorted, to the terminal.
        ping_ms: the same of calls of an actor that is beside the others.
        seconds: how long lines of actors came.
        script_mib: the most memory that the script had, after it had begun to show lines, and at the beginning of that.
        kept_nbytes: of the files with the output.
        others: lines of the terminal that are none of these.
    """

    actors: int
    printed: int
    shown: int
    folded: int
    dropped: int
    told: int
    beats: int
    beats_printed: int
    beat_ms: float
    ping_ms: float
    seconds: float
    script_mib: tuple[float, float]
    kept_nbytes: int
    others: tuple[str, ...]

    @property
    def is_accounted_for(self) -> bool:
        """Whether each line was shown, is stood for by another one, or was counted as dropped."""
        return self.printed == self.shown + self.folded + self.dropped


class FloodReader:
    """Reads a terminal as a person does, from top to bottom, and notes when what came."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._read = 0
        self.begin_s = self.end_s = 0.0
        self.shown = self.folded = self.told = 0
        self.beats: list[int] = []
        self.beat_s: list[float] = []
        self.others: list[str] = []

    def read(self) -> None:
        """Take the lines that are whole by now."""
        text = self._terminal.text
        end = text.rfind("\n") + 1
        for line in re.sub(r"\x1b\[[0-9;]*m", "", text[self._read : end]).splitlines():
            self._take(line.rstrip("\r"))
        self._read = end

    def _take(self, line: str) -> None:
        if (dropped := re.match(r"^\[logs\] … ([\d,]+) lines of ", line)) is not None:
            self.told += int(dropped[1].replace(",", ""))
        elif (beat := _BEAT.match(line)) is not None:
            self.beats.append(int(beat["number"]))
            self.beat_s.append(time.time() - float(beat["at"]))
        elif (found := _SHOWN.match(line)) is not None:
            self.begin_s = self.begin_s or time.monotonic()
            self.end_s = time.monotonic()
            alike = _ALIKE.search(found["prefix"])
            self.shown += 1
            if alike is not None:
                self.folded += int(alike["others"] or 0) or int(alike["same"]) - 1
        else:
            self.others.append(line)


class Memory:
    """How much memory a process has, and had at most."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self.first = self.most = 0

    def look(self) -> None:
        """Look now."""
        with contextlib.suppress(psutil.Error):  # it has ended
            now = self._process.memory_info().rss
            self.first = self.first or now
            self.most = max(self.most, now)


def flood(actors: int, processes: int, lines: int, seconds: float) -> FloodReport:
    """Run the script in a terminal, and look."""
    with tempfile.TemporaryDirectory(prefix="skipper-flood-") as name:
        folder = Path(name)
        words = ("--actors", actors, "--processes", processes, "--lines", lines, "--seconds", seconds)
        command = [sys.executable, "-m", "tests.control.observe.flood_script", *map(str, words)]
        command += ["--outcome", str(folder / "outcome.json")]
        with Terminal(command, _environment(folder), wraps=True, columns=120) as terminal:
            reader, memory = _watched(terminal, patience_s=300 + 10 * seconds)
            assert terminal.process.returncode == 0, terminal.text[-5000:]
        outcome = json.loads((folder / "outcome.json").read_text())
        kept = sum(path.stat().st_size for path in Path(outcome["folder"]).iterdir())
    pings = outcome["ping_ms"]
    return FloodReport(
        actors=outcome["actors"],
        printed=outcome["printed"],
        shown=reader.shown,
        folded=reader.folded,
        dropped=outcome["dropped"],
        told=reader.told,
        beats=len(reader.beats) if reader.beats == sorted(reader.beats) else 0,
        beats_printed=outcome["beats"],
        beat_ms=round(1e3 * _late(reader.beat_s), 1),
        ping_ms=_late(pings),
        seconds=round(reader.end_s - reader.begin_s, 1),
        script_mib=(memory.most >> 20, memory.first >> 20),
        kept_nbytes=kept,
        others=tuple(reader.others),
    )


def _environment(folder: Path) -> dict[str, str]:
    # Unbuffered, Python writes a line and its end one after the other, and what comes between is nobody's fault.
    left_out = ("CI", "NO_COLOR", "PYTHONUNBUFFERED", "SKIPPER_LOGS")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    own = {"TERM": "xterm", "SKIPPER_PROGRESS": "off", "SKIPPER_LOG_FOLDER": str(folder / "logs")}
    return {**kept, **own, "PYTHONPATH": f"{REPOSITORY / 'src'}{os.pathsep}{REPOSITORY}"}


def _watched(terminal: Terminal, patience_s: float) -> tuple[FloodReader, Memory]:
    reader, memory = FloodReader(terminal), Memory(terminal.process.pid)

    def look() -> bool:
        reader.read()
        if reader.shown:
            memory.look()
        return terminal.process.poll() is not None

    terminal.read_until(look, patience_s)
    terminal.run(patience_s)
    reader.read()
    return reader, memory


def _late(times: Sequence[float]) -> float:
    """The ninth of ten, by the nearest rank."""
    return sorted(times)[max(math.ceil(0.9 * len(times)) - 1, 0)] if times else 0.0


def main() -> int:
    """Run as the command line says; prints the report as JSON."""
    parser = argparse.ArgumentParser(prog="python -m tests.control.observe.flood", description=__doc__)
    parser.add_argument("--actors", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--lines", type=int, default=100, help="a second, of each actor (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args()
    report = flood(given.actors, given.processes, given.lines, given.seconds)
    print(json.dumps({**asdict(report), "accounted for": report.is_accounted_for}, indent=2))
    return 0 if report.is_accounted_for else 1


if __name__ == "__main__":
    sys.exit(main())
