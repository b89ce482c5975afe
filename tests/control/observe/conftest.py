"""A served job of two processes with an actor in each, which the tests of a module share."""

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skipper import control
from skipper.cli import main
from skipper.control import ActorMesh, ProcMesh, ServedJob, serve_job, this_host
from skipper.control.model.settings import adopt
from skipper.control.observe.log_files import FOLDER_VARIABLE, LogFiles
from tests.control.actors import Echo
from tests.control.conftest import PATIENCE_S, REPOSITORY, wait_until
from tests.control.observe.job_output import source
from tests.freezing import freeze

Skipper = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(autouse=True, scope="module")
def runtime_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("run")
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        before = control.configure()
        control.configure(heartbeat_s=60.0)  # some are made to stand still
        yield folder
        adopt(before)


@pytest.fixture(scope="module")
def served(runtime_folder: Path) -> Iterator[ServedJob]:
    with serve_job("tools") as served:
        yield served


@pytest.fixture(scope="module")
def workers(runtime_folder: Path) -> ProcMesh:
    return this_host().spawn_procs({"gpus": 2}, name="workers")


@pytest.fixture(scope="module")
def echoes(workers: ProcMesh) -> ActorMesh[Echo]:
    mesh = workers.spawn("echoes", Echo)
    mesh.initialized.get(PATIENCE_S)
    return mesh


@pytest.fixture
def skipper(served: ServedJob) -> Skipper:
    """Runs a command of ``skipper`` on the job of this process."""

    def run(*words: str, stdin: str = "", job: str = "tools") -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "skipper.cli.main", words[0], "--job", job, *words[1:]],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            env={**os.environ, "PYTHONPATH": f"{REPOSITORY / 'src'}{os.pathsep}{REPOSITORY}"},
        )

    return run


@pytest.fixture
def blocked(echoes: ActorMesh[Echo], tmp_path: Path) -> Iterator[ActorMesh[Echo]]:
    """The actor of rank 1, in an endpoint that ends with the test."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    busy = echoes.slice(gpus=1)
    future = busy.run.call_one(block_on, str(fifo))
    wait_until(lambda: can_be_written_to(fifo), "the actor has opened the pipe")
    yield busy
    fifo.write_text("go on")
    assert future.get(PATIENCE_S) == "go on"


@pytest.fixture
def frozen(echoes: ActorMesh[Echo]) -> Iterator[int]:
    """The pid of rank 0, which stands still."""
    pid = echoes.slice(gpus=0).pid.call_one().get(PATIENCE_S)
    freeze(pid)
    yield pid
    os.kill(pid, signal.SIGCONT)
    assert echoes.slice(gpus=0).pid.call_one().get(PATIENCE_S) == pid


@pytest.fixture
def here(served: ServedJob, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Skipper:
    """Runs a command as `skipper` does, within this process, which looks at its own job then: that is quicker."""

    def run(*words: str, stdin: str = "", job: str = "tools") -> "subprocess.CompletedProcess[str]":
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        code = main.main([words[0], "--job", job, *words[1:]])
        said = capsys.readouterr()
        return subprocess.CompletedProcess(words, code, said.out, said.err)

    return run


def can_be_written_to(fifo: Path) -> bool:
    """Whether somebody reads there."""
    try:
        os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def block_on(fifo: str) -> str:
    """Runs in an actor: waits until the test writes into the named pipe."""
    pipe = os.open(fifo, os.O_RDWR)
    said = os.read(pipe, 100)
    os.close(pipe)
    return said.decode()


def hold_the_lock(fifo: str) -> None:
    """Runs in an actor: waits likewise, without letting go of the interpreter lock."""
    import ctypes

    pipe = os.open(fifo, os.O_RDWR)
    ctypes.PyDLL(None).read(pipe, ctypes.create_string_buffer(1), 1)
    os.close(pipe)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LogFiles]:
    """The output of a job whose first process has written one line."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    files = LogFiles(None, "abc")
    files.keep(source(0), b"first\n")
    yield files
    files.close()
