"""`LocalJob`: hosts that are processes of this machine, each with an address of its own; for development."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from skipper.control.cluster.jobs.engine import Place, PlaceState
from skipper.control.cluster.jobs.folder import JobFolder, place_behind, read_log, start_into
from skipper.control.cluster.jobs.job import Job
from skipper.control.model.errors import JobError
from skipper.control.runtime.procs.children import describe_exit

AGENT = Path(__file__).parents[1] / "hosts" / "__main__.py"

_FIRST = ipaddress.IPv4Address("127.0.0.2")
"""The address of place 0; the others follow. All of 127.0.0.0/8 belongs to this machine (RFC 1122, 3.2.1.3)."""

_END_S = 10.0


class LocalJob(Job):
    """Agents as child processes on loopback addresses; otherwise the same as on a cluster. Elastic.

    They end with this process, in any way that it ends.

    Args:
        places: how many.
        folder: the folder to keep logs in; None: they are deleted with the job.

    Raises:
        ValueError: ``places`` is below 1.

    Example:
        ```python
        from skipper.control import Actor, current_rank, endpoint
        from skipper.control.cluster.jobs import LocalJob

        class Worker(Actor):
            @endpoint
            def where(self) -> dict[str, int]:
                return dict(current_rank())

        with LocalJob(2) as job:  # two hosts, both on this machine
            workers = job.hosts().spawn_procs({"gpus": 1}).spawn("workers", Worker)
            print(workers.where.call().get(timeout=60))  # [{'hosts': 0, 'gpus': 0}, {'hosts': 1, 'gpus': 0}]
        ```
    """

    def __init__(self, places: int, *, folder: str | os.PathLike[str] | None = None) -> None:
        super().__init__(LocalEngine(JobFolder(folder)), places)


@dataclass(frozen=True, slots=True)
class PlaceProcess:
    """A child process of this one: an agent, or a connection to one.

    Attributes:
        rank: of its place.
        name: its unique name in the job.
        popen: the process; its standard input is a pipe, whose end tells the agent that this process has ended.
        log: its output.
    """

    rank: int
    name: str
    popen: subprocess.Popen[bytes]
    log: Path

    def hang_up(self) -> None:
        """Close the standard input; idempotent."""
        assert self.popen.stdin is not None  # `start_into` asks for it
        with contextlib.suppress(OSError):
            self.popen.stdin.close()


class ProcessEngine(ABC):
    """Child processes of this one as places; see `Engine`. `cancel` removes the folder of the job."""

    is_elastic = True
    kind: str
    """The kind of a child, for people."""

    def __init__(self, folder: JobFolder, certs: Path | None = None) -> None:
        self.certs = certs
        self.folder = folder
        self._children: list[PlaceProcess] = []
        self._started = 0

    @abstractmethod
    def start(self, rank: int, name: str, log: Path) -> subprocess.Popen[bytes]:
        """Start the child of a place.

        Raises:
            JobError: it cannot be started.
        """

    @abstractmethod
    def place_of(self, child: PlaceProcess) -> Place:
        """The place of a running child."""

    def ask_to_end(self, child: PlaceProcess, *, is_lost: bool) -> None:
        """Ask a child to end by itself; at once if its place is lost, if it can."""
        child.hang_up()

    @property
    def secret_file(self) -> Path:
        """See `Engine`."""
        return self.folder.secret_file

    def submit(self, places: int) -> None:
        """Start the children."""
        for rank in range(places):
            self._children.append(self._start(rank))

    def poll(self) -> Sequence[Place]:
        """Look at each process, and at its agent's announcement."""
        return [self._place(child) for child in self._children]

    def replace(self, rank: int) -> None:
        """End the child, and start another."""
        self._end([self._children[rank]], is_lost=True)
        self._children[rank] = self._start(rank)

    def log(self, rank: int) -> str:
        """The output of the place's present agent."""
        return read_log(self._children[rank].log)

    def cancel(self) -> None:
        """End the agents, and wait for that."""
        self._end(self._children)
        self.folder.close()

    def _start(self, rank: int) -> PlaceProcess:
        name = f"{rank}-{self._started}"
        self._started += 1
        log = self.folder.logs / f"{name}.log"
        return PlaceProcess(rank, name, self.start(rank, name, log), log)

    def _place(self, child: PlaceProcess) -> Place:
        place, status = self.place_of(child), child.popen.poll()
        if status is None:
            return place
        if status == 0:
            return Place(PlaceState.ENDED, name=place.name, reason="its agent has ended")
        return Place(PlaceState.FAILED, name=place.name, reason=f"{self.kind} {describe_exit(status)}")

    def _end(self, children: Sequence[PlaceProcess], *, is_lost: bool = False) -> None:
        """End children, with everything that they have started, and leave no zombie."""
        for child in children:
            self.ask_to_end(child, is_lost=is_lost)
        for child in children:
            try:
                child.popen.wait(_END_S)
            except subprocess.TimeoutExpired:  # it is stopped
                child.popen.kill()
                child.popen.wait()
            child.hang_up()


class LocalEngine(ProcessEngine):
    """Agents of this machine as places."""

    kind = "its agent"

    def start(self, rank: int, name: str, log: Path) -> subprocess.Popen[bytes]:
        """See `ProcessEngine`."""
        command = [sys.executable, str(AGENT), "serve", "--address", f"tcp://{_FIRST + rank}:0", "--until-eof"]
        command += ["--secret-file", str(self.secret_file), "--announce", str(self.folder.announcement(name))]
        try:
            return start_into(log, command)
        except OSError as error:
            raise JobError(f"cannot start an agent here: {error}") from error

    def place_of(self, child: PlaceProcess) -> Place:
        """See `ProcessEngine`."""
        return place_behind(self.folder.announcement(child.name), f"pid {child.popen.pid}")

    def ask_to_end(self, child: PlaceProcess, *, is_lost: bool) -> None:
        """See `ProcessEngine`."""
        child.popen.send_signal(signal.SIGKILL if is_lost else signal.SIGTERM)
