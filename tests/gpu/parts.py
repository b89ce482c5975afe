"""Parts of a run: commands, each within its time and in a group of processes that ends with it."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.tree import ROOT

RECORD_VARIABLE = "SKIPPER_GPU_RECORD"
"""Names the file that `record` writes."""

_GRACE_S = 3.0


@dataclass(frozen=True, slots=True)
class Part:
    """A command of the environment's Python.

    Attributes:
        name: For people, and of its files.
        arguments: Of that Python.
        limit_s: The longest that it may take.
    """

    name: str
    arguments: Sequence[str]
    limit_s: float


@dataclass(frozen=True, slots=True)
class Ended:
    """How a part ended: its status, or None where its time was over, and how long it took."""

    status: int | None
    seconds: float
    output: str


class Runner:
    """Runs parts one after another within one deadline, and keeps all that they print.

    Args:
        python: Of the environment.
        log: The file that gets their output, as it comes.
        total_s: For all parts together.
    """

    def __init__(self, python: Path, log: Path, total_s: float) -> None:
        self._python = python
        self._log = log
        self._deadline = time.monotonic() + total_s

    @property
    def left_s(self) -> float:
        """Until the deadline."""
        return max(0.0, self._deadline - time.monotonic())

    def run(self, part: Part, environment: Mapping[str, str] | None = None) -> Ended:
        """Run it; where the common time ends before its own does, it has only that."""
        limit_s = min(part.limit_s, self.left_s)
        begin = time.monotonic()
        if limit_s < 1:
            return Ended(None, 0.0, "not begun: the time of the whole run is over")
        with self._log.open("a", encoding="utf-8") as log:
            log.write(f"\n=== {part.name}: at most {limit_s:.0f} s: python {' '.join(part.arguments)}\n")
            log.flush()
            started_at = log.tell()
            process = subprocess.Popen(
                [str(self._python), *part.arguments],
                cwd=ROOT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            status = _wait(process, limit_s)
        with self._log.open(encoding="utf-8", errors="replace") as log:
            log.seek(started_at)
            return Ended(status, time.monotonic() - begin, log.read())


def _wait(process: "subprocess.Popen[bytes]", limit_s: float) -> int | None:
    """Its status; None after its time, when it is asked to end and then made to. Nothing of its group stays."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # pytest and the benchmarks tell what they have
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
        return None
    finally:
        _kill_group(process)


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
