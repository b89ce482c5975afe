"""Hosts to measure with: real agents on this machine, or hollow ones, with the same few methods."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from skipper.benchmarks.errors import BenchmarkError
from skipper.control.cluster.hollow import HollowHosts
from skipper.control.cluster.hosts import HostMesh, attach_to_hosts
from skipper.control.cluster.hosts.command import main as host_command

__all__ = ["HOLLOW", "MEASURED", "HostSource", "hosts_of"]

HOLLOW, MEASURED = "hollow", "measured"
"""Labels of cells: of hollow hosts, and of real ones with a process of the operating system for each of theirs."""

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_STOPPED = "TtZX"
"""The letters by which the kernel says that a process is stopped or has ended (proc(5))."""
_STOP_POLL_S = 0.001


class HostSource(Protocol):
    """Some hosts of this machine, in the order of their numbers."""

    def attach(self, *, timeout: float) -> HostMesh:
        """Make them part of the job."""

    def kill(self, host: int) -> float:
        """End a host with all of its processes; returns when that was, in seconds of `time.monotonic`."""

    def kill_process(self, host: int) -> float:
        """End the first process that the job has spawned on a host; returns when that was."""

    def freeze(self, host: int) -> float:
        """Make a host silent; returns when that was."""

    def kill_all(self) -> float:
        """End all hosts at once; returns when that was."""

    def cpu_s(self) -> float:
        """CPU time that their processes have used; hardly any for the answer."""


@contextlib.contextmanager
def hosts_of(label: str, count: int, *, own_ips: bool) -> Iterator[HostSource]:
    """Start hosts; they end with the block.

    Args:
        label: `HOLLOW` or `MEASURED`.
        count: How many.
        own_ips: Whether each has an IP of its own, so that links are those between hosts.

    Raises:
        BenchmarkError: An agent did not start.
        HollowHostError: The process of hollow hosts did not start.
    """
    if label == HOLLOW:
        with HollowHosts(count, own_ips=own_ips) as hollow:
            yield hollow
    else:
        with tempfile.TemporaryDirectory() as folder, contextlib.closing(_Agents(count, Path(folder), own_ips)) as real:
            yield real


class _Agents:
    """Real agents, as ``skipper host serve`` starts them."""

    def __init__(self, count: int, folder: Path, own_ips: bool) -> None:
        self._secret_file = folder / "secret"
        self._agents: list[subprocess.Popen[str]] = []
        if host_command(["secret", str(self._secret_file)]):
            raise BenchmarkError("no secret for the agents could be made")
        try:
            for host in range(count):
                ip = f"127.63.{host // 250 + 1}.{host % 250 + 1}" if own_ips else "127.0.0.1"
                self._agents.append(self._start(ip))
            self._addresses = [_address_of(agent) for agent in self._agents]
        except BaseException:
            self.close()
            raise

    def attach(self, *, timeout: float) -> HostMesh:
        """Make them part of the job."""
        return attach_to_hosts(self._addresses, secret_file=self._secret_file, timeout=timeout)

    def kill(self, host: int) -> float:
        """Kill an agent, with which its processes end."""
        return _signal(_family(self._agents[host].pid)[:1], signal.SIGKILL)

    def kill_process(self, host: int) -> float:
        """Kill the process of the actor, which is the furthest below the agent."""
        return _signal(_family(self._agents[host].pid)[-1:], signal.SIGKILL)

    def freeze(self, host: int) -> float:
        """Stop an agent and its processes."""
        return _stop(self._agents[host].pid)

    def kill_all(self) -> float:
        """Kill all agents and their processes."""
        return _signal([pid for agent in self._agents for pid in _family(agent.pid)], signal.SIGKILL)

    def cpu_s(self) -> float:
        """CPU time that agents and their processes have used."""
        return sum(_cpu_s(pid) for agent in self._agents for pid in _family(agent.pid))

    def close(self) -> None:
        """End the agents and what is left below them."""
        for agent in self._agents:
            _signal(_family(agent.pid), signal.SIGKILL)
        for agent in self._agents:
            agent.wait()
            if agent.stdout is not None:
                agent.stdout.close()

    def _start(self, ip: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "skipper.cli.main", "host", "serve", "--address", f"tcp://{ip}:0"]
        return subprocess.Popen(
            [*command, "--secret-file", str(self._secret_file)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )


def _address_of(agent: subprocess.Popen[str]) -> str:
    """Where an agent listens, as it says itself."""
    assert agent.stdout is not None  # it is a pipe
    words = agent.stdout.readline().split()
    address = next((word for word in words if word.startswith("tcp://")), None)
    if address is None:
        raise BenchmarkError(f"an agent did not start (pid {agent.pid})")
    return address


def _family(pid: int) -> list[int]:
    """A process and its descendants; those that have ended are left out."""
    family = [pid]
    for parent in family:
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{parent}/task"):
                family += map(int, Path(f"/proc/{parent}/task/{task}/children").read_text().split())
    return family


def _signal(pids: Sequence[int], number: int) -> float:
    at_s = time.monotonic()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return at_s


def _stop(pid: int) -> float:
    """Stop a process and its descendants, and return once none of them runs any more.

    The kernel lists the children of a running process incompletely, and a signal takes effect after it was sent.
    """
    at_s = time.monotonic()
    while running := [member for member in _family(pid) if _state(member) not in _STOPPED]:
        _signal(running, signal.SIGSTOP)
        time.sleep(_STOP_POLL_S)
    return at_s


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"  # it has just ended


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0  # it has just ended
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
