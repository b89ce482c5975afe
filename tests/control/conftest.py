"""Meshes for the tests, and the rule that a failure nobody expected fails its test."""

import io
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from skipper import control
from skipper.control import MeshFailure, ProcMesh, this_host
from skipper.control.observe import log_output

REPOSITORY = Path(__file__).parents[2]
PATIENCE_S = 20.0
"""Bound on waits that take milliseconds where nothing is wrong."""


class Failures(list[MeshFailure]):
    """What reached the root unhandled; a test that asks for the fixture expects it."""

    expected = False

    def wait(self) -> MeshFailure:
        """The first failure, once it is there."""
        wait_until(lambda: bool(self), "a failure at the root")
        return self[0]


def wait_until(condition: Callable[[], bool], what: str, *, timeout: float = PATIENCE_S) -> None:
    """Poll for something that happens in another process."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"timed out after {timeout} s: {what}"
        time.sleep(0.005)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def hogs(count: int, cpu: int | None = None) -> Iterator[None]:
    """Processes that take all CPU time that they get; all at one CPU, if that is named."""
    command = [sys.executable, "-S", "-c", "print(flush=True)\nwhile True: pass"]
    if cpu is not None:
        command = ["taskset", "--cpu-list", str(cpu), *command]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for hog in started:
            assert hog.stdout is not None
            hog.stdout.readline()
        yield
    finally:
        for hog in started:
            hog.kill()
            hog.communicate()


@pytest.fixture(autouse=True)
def root_failures(monkeypatch: pytest.MonkeyPatch) -> Iterator[Failures]:
    failures = Failures()
    monkeypatch.setattr(control, "unhandled_fault_hook", failures.append)
    yield failures
    assert failures.expected or not failures, f"unexpected failures: {[str(failure) for failure in failures]}"


@pytest.fixture
def failures(root_failures: Failures) -> Failures:
    root_failures.expected = True
    return root_failures


@pytest.fixture(scope="module", autouse=True)
def leave_nothing_behind() -> Iterator[None]:
    before = set(psutil.Process().children(recursive=True))  # of other suites in the same run
    yield
    children = set(psutil.Process().children(recursive=True)) - before
    control.shutdown()
    for child in children:
        wait_until(lambda child=child: not alive(child.pid), f"{child} ends")


@pytest.fixture(scope="module")
def procs() -> ProcMesh:
    """Two processes that the tests of a module share."""
    return this_host().spawn_procs(per_host={"gpus": 2})


@pytest.fixture
def own_procs() -> Iterator[Callable[..., ProcMesh]]:
    """Spawns processes that end with the test."""
    spawned: list[ProcMesh] = []

    def spawn(per_host: dict[str, int] | None = None, **options: object) -> ProcMesh:
        spawned.append(this_host().spawn_procs(per_host, **options))
        return spawned[-1]

    yield spawn
    for mesh in spawned:
        mesh.stop().get(PATIENCE_S)


class Output:
    """What has come out so far. Not by pytest's `capfd`, which loses what is written while it is read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._out, self._err = io.StringIO(), io.StringIO()
        # Not those of `sys` itself, which pytest sets anew between a test's fixtures and its body.
        monkeypatch.setattr(log_output, "sys", SimpleNamespace(stdout=self._out, stderr=self._err))

    @property
    def out(self) -> str:
        return self._out.getvalue()

    @property
    def err(self) -> str:
        return self._err.getvalue()

    def wait_for(self, text: str, *, on_stderr: bool = False) -> str:
        """The stream with that text, once it is there."""
        wait_until(lambda: text in (self.err if on_stderr else self.out), f"{text!r} comes out")
        return self.err if on_stderr else self.out


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch) -> Output:
    return Output(monkeypatch)


class Script:
    """A script in a process of its own."""

    def __init__(self, path: Path, arguments: Sequence[str], folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(path), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={
                "PYTHONPATH": f"{REPOSITORY}/src:{REPOSITORY}",
                "PATH": "/usr/bin:/bin",
                "PYTHONDONTWRITEBYTECODE": "1",
                "SKIPPER_LOG_FOLDER": str(folder / "logs"),
                # Python 3.12 and newer say so of every fork in a script that has threads; Skipper's have.
                "PYTHONWARNINGS": "ignore:This process:DeprecationWarning",
            },
        )

    def line(self) -> str:
        """The next line of its standard output."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def finish(self) -> tuple[int, str, str]:
        """Exit code, rest of the standard output, standard error."""
        try:
            out, err = self.process.communicate(timeout=PATIENCE_S)
        finally:
            self.process.kill()
        return self.process.returncode, out, err


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Callable[..., Script]]:
    """Starts a script: a file of these tests with its arguments, or a text, which is written to a file."""
    scripts: list[Script] = []

    def run(program: str | Path, *arguments: str) -> Script:
        path = program if isinstance(program, Path) else tmp_path / f"script{len(scripts)}.py"
        if isinstance(program, str):
            path.write_text(textwrap.dedent(program))
        scripts.append(Script(path, arguments, tmp_path))
        return scripts[-1]

    yield run
    for started in scripts:
        with started.process:  # closes its pipes
            started.process.kill()
