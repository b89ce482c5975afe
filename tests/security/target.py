"""`Target`: the job of `tests.security.job` as those see it who started it."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0


class Target:
    """A job that runs; a context manager.

    Args:
        arguments: for the module.
        folder: what it is to have for temporary files and for its user's own.
        module: the program; it says what it is in a line of JSON, and then a line for each round.

    Attributes:
        report: what it said of itself at the beginning.
        rounds: what it has said of each round since.
    """

    def __init__(self, *arguments: str, folder: Path, umask: int = 0o022, module: str = "tests.security.job") -> None:
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SKIPPER_", "UCX_")) and name not in ("XDG_RUNTIME_DIR", "TMPDIR")
        }
        self.rounds: list[dict[str, Any]] = []
        self._news = threading.Condition()
        self.log = folder / "job.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
                env=environment | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)},
                umask=umask,
            )
        assert self.process.stdout is not None
        first = self.process.stdout.readline()
        if not first:
            self.process.wait(PATIENCE_S)
            raise AssertionError(f"the job did not come up: {self.log.read_text()}")
        self.report: dict[str, Any] = json.loads(first)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Of the script."""
        return self.process.pid

    def pids(self) -> list[int]:
        """Of all its processes."""
        found = [self.pid]
        for pid in found:
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                found += map(int, children.read_text().split())
        return found

    def wait_for_rounds(self, more: int) -> list[dict[str, Any]]:
        """The next rounds, once they are over."""
        with self._news:
            here = len(self.rounds)
            assert self._news.wait_for(
                lambda: len(self.rounds) >= here + more or self.process.poll() is not None, PATIENCE_S * more
            ), f"the job does not go on after {here} rounds: {self.log.read_text()}"
            assert self.process.poll() is None, f"the job has ended: {self.log.read_text()}"
            return self.rounds[here:]

    def close(self) -> int:
        """End it; what it said at the end is its exit code."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.process.stdin.close()
            try:
                self.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.process.send_signal(signal.SIGKILL)
                self.process.wait()
                raise
            finally:
                self._reader.join(PATIENCE_S)
                assert self.process.stdout is not None
                self.process.stdout.close()
        return self.process.returncode

    def __enter__(self) -> "Target":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.rounds.append(json.loads(line))
                self._news.notify_all()
        with self._news:
            self._news.notify_all()
