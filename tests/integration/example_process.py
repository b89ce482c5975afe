"""Running an example as a user does: in a process of its own, of which nothing may be left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parents[2]
GONE_WITHIN_S = 10.0


def files_in_shm() -> set[str]:
    """What lies in shared memory, without the semaphores of `multiprocessing`: examples have none, other tests do."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


@dataclass
class ExampleProcess:
    """A running example, known with all its offspring by a mark in the environment."""

    process: subprocess.Popen[str]
    mark: str
    out: list[str] = field(default_factory=list)
    err: list[str] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)

    @property
    def stdout(self) -> str:
        return "".join(self.out)

    @property
    def stderr(self) -> str:
        return "".join(self.err)

    def family(self) -> dict[int, str]:
        """Every process that carries the mark, by id, with its command line."""
        members = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                environment = (entry / "environ").read_bytes()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue  # it ended while being looked at
            if self.mark.encode() in environment and state not in "ZX":
                members[int(entry.name)] = command
        return members

    def children(self) -> list[int]:
        return sorted(set(self.family()) - {self.process.pid})

    def wait(self, timeout: float) -> int:
        """The exit code; fails the test when the example runs for longer than ``timeout`` seconds."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s\n{self.stdout}\n{self.stderr}") from None
        for thread in self.threads:
            thread.join(timeout)
        return code

    def assert_nobody_left(self) -> None:
        """Every process of the example must have ended, or end within seconds."""
        wait_until(lambda: not self.family(), GONE_WITHIN_S, lambda: f"left behind: {self.family()}")


def _collect(stream: TextIO, lines: list[str]) -> None:
    for line in stream:
        lines.append(line)


def wait_until(condition: Callable[[], object], timeout: float, describe: Callable[[], str]) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(describe())
        time.sleep(0.02)


@contextmanager
def running(*arguments: str) -> Iterator[ExampleProcess]:
    """Start ``python ARGUMENTS`` in the root of the project; kill what is left of it in the end."""
    mark = f"SKIPPER_TEST_MARK={uuid.uuid4().hex}"
    name, _, value = mark.partition("=")
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, name: value},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    example = ExampleProcess(process, mark)
    assert process.stdout is not None
    assert process.stderr is not None
    for stream, lines in ((process.stdout, example.out), (process.stderr, example.err)):
        thread = threading.Thread(target=_collect, args=(stream, lines), daemon=True)
        thread.start()
        example.threads.append(thread)
    try:
        yield example
    finally:
        for pid in example.family():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.wait(GONE_WITHIN_S)
        for thread in example.threads:
            thread.join(GONE_WITHIN_S)
        process.stdout.close()
        process.stderr.close()


def run(*arguments: str, timeout: float = 90.0) -> ExampleProcess:
    """Run ``python ARGUMENTS`` to its end and make sure that none of its processes is left."""
    with running(*arguments) as example:
        example.wait(timeout)
        example.assert_nobody_left()
        return example
