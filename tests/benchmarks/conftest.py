import contextlib
import subprocess
from collections.abc import Iterator

import pytest

from tests.benchmarks.programs import BW, LIMIT_S, ROOT, TOKEN, Start, Terminal, environment


@pytest.fixture
def start() -> Iterator[Start]:
    """Start programs, and see to it that none outlives the test."""
    started: list[subprocess.Popen[str]] = []

    def begin(*argv: str, token: str | None = TOKEN, stderr: int = subprocess.PIPE) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*BW, *argv],
            cwd=ROOT,
            env=environment(token),
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=LIMIT_S)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    with contextlib.closing(Terminal()) as opened:
        yield opened
