"""`LocalJob`: hosts that are processes of this machine, each with an address of its own; to develop with."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import subprocess
import sys
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
"""The address of place 0; those of others follow. All of 127.0.0.0/8 is this machine's (RFC 1122, 3.2.1.3)."""

_END_S = 10.0


class LocalJob(Job):
    """Agents as child processes on loopback addresses: the way is the same as on a cluster. Elastic.

    They end with this process, however that ends.

    Args:
        places: how many.
        folder: where logs are kept; None: they go with the job.

    Raises:
        ValueError: there is not one place at least.
    """

    def __init__(self, places: int, *, folder: str | os.PathLike[str] | None = None) -> None:
        super().__init__(LocalEngine(JobFolder(folder)), places)


@dataclass(frozen=True, slots=True)
class _Agent:
    """One agent.

    Attributes:
        popen: its process; its standard input is the pipe by whose end it learns of ours.
        announcement: where it says where it listens.
        log: what it writes.
    """

    popen: subprocess.Popen[bytes]
    announcement: Path
    log: Path


class LocalEngine:
    """Child processes as places; see `Engine`.

    Args:
        folder: of the job; removed when it is cancelled.
    """

    is_elastic = True
    certs = None

    def __init__(self, folder: JobFolder) -> None:
        self._folder = folder
        self._agents: list[_Agent] = []
        self._started = 0

    @property
    def secret_file(self) -> Path:
        """See `Engine`."""
        return self._folder.secret_file

    def submit(self, places: int) -> None:
        """Start the agents."""
        for rank in range(places):
            self._agents.append(self._start(rank))

    def poll(self) -> Sequence[Place]:
        """Look at each process, and at what it has announced."""
        return [_place(agent) for agent in self._agents]

    def replace(self, rank: int) -> None:
        """Kill the agent, and start another."""
        _end([self._agents[rank]], signal.SIGKILL)
        self._agents[rank] = self._start(rank)

    def log(self, rank: int) -> str:
        """What was written; only what the present agent of the place has."""
        return read_log(self._agents[rank].log)

    def cancel(self) -> None:
        """End the agents, and wait for that."""
        _end(self._agents, signal.SIGTERM)
        self._folder.close()

    def _start(self, rank: int) -> _Agent:
        name = f"{rank}-{self._started}"
        self._started += 1
        announcement, log = self._folder.announcement(name), self._folder.logs / f"{name}.log"
        command = [sys.executable, str(AGENT), "serve", "--address", f"tcp://{_FIRST + rank}:0", "--until-eof"]
        command += ["--secret-file", str(self._folder.secret_file), "--announce", str(announcement)]
        try:
            popen = start_into(log, command)
        except OSError as error:
            raise JobError(f"no agent can be started here: {error}") from error
        return _Agent(popen, announcement, log)


def _place(agent: _Agent) -> Place:
    status, name = agent.popen.poll(), f"pid {agent.popen.pid}"
    if status is None:
        return place_behind(agent.announcement, name)
    if status == 0:
        return Place(PlaceState.ENDED, name=name, reason="its agent has ended")
    return Place(PlaceState.FAILED, name=name, reason=f"its agent {describe_exit(status)}")


def _end(agents: Sequence[_Agent], number: signal.Signals) -> None:
    """End agents, and what they have started with them, and leave no zombie."""
    for agent in agents:
        agent.popen.send_signal(number)
    for agent in agents:
        try:
            agent.popen.wait(_END_S)
        except subprocess.TimeoutExpired:  # it stands still
            agent.popen.kill()
            agent.popen.wait()
        if agent.popen.stdin is not None:
            with contextlib.suppress(OSError):
                agent.popen.stdin.close()
