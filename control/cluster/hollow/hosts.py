"""`HollowHosts`: hollow hosts for a script: it starts them, attaches them, and makes them fail."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skipper.control.api.mesh import HostMesh
from skipper.control.cluster.hosts.attach import attach_to_hosts
from skipper.control.model.bounds import check_count
from skipper.control.model.errors import HollowHostError
from skipper.control.support import private_file
from skipper.control.wire import addresses

PER_PROCESS, PER_PROCESS_WITH_IPS = 1024, 128
"""Hosts in one process of the operating system. Each takes about fifteen descriptors; several times as many, and two
threads, if gRPC listens for it."""

MAX_HOSTS = 16_384

_END_TIMEOUT_S = 15.0
_SECRET_NBYTES = 32


@dataclass(frozen=True, slots=True)
class HostsUsage:
    """The resources that the processes of all hollow hosts use together.

    The example of `HollowHosts` shows one.

    Attributes:
        cpu_s: CPU time since their start.
        memory_nbytes: resident memory.
        descriptors: open file descriptors.
        threads: running threads.
    """

    cpu_s: float
    memory_nbytes: int
    descriptors: int
    threads: int


class HollowHosts:
    """Simulated hosts. They and their processes speak the real protocol, without a machine for each.

    Links, handshakes, heartbeats, trees, replies and the handling of failures are the real code. All actors in one
    process of the operating system share one thread: they have sync endpoints, which answer and do not wait. What needs
    more is refused: ``async`` endpoints, ``bootstrap``, calls from such an actor to others.

    A context manager. Use it with `attach`, or with `attach_to_hosts` and `addresses` and `secret_file`.

    Args:
        count: the number of hosts.
        own_ips: give each an IP of its own in 127.0.0.0/8, so that links between them are those between hosts (gRPC
            over TCP); else all are on this host, and links are sockets within the host.
        per_process: how many of them share a process; None: 1,024, or 128 with IPs of their own.

    Raises:
        ValueError: ``count`` is below 1, or above `MAX_HOSTS`.
        HollowHostError: one of their processes has not started.

    Example:
        ```python
        from skipper import control
        from skipper.control import Actor, current_rank, endpoint
        from skipper.control.cluster.hollow import HollowHosts, HostsUsage

        class Counter(Actor):
            @endpoint
            def count(self, by: int) -> int:
                return current_rank().rank * by

        with HollowHosts(10) as hollow:
            counters = hollow.attach().spawn_procs().spawn("counters", Counter)
            print(sum(counters.count.call(2).get(timeout=60)))  # 90
            usage: HostsUsage = hollow.usage()
            print(usage.threads > 0)  # True
            control.shutdown()
        ```
    """

    def __init__(self, count: int, *, own_ips: bool = False, per_process: int | None = None) -> None:
        per_process = per_process or (PER_PROCESS_WITH_IPS if own_ips else PER_PROCESS)
        check_count("the number of hollow hosts", count, 1, MAX_HOSTS)
        check_count("the number of hollow hosts in a process", per_process, 1, MAX_HOSTS)
        secret = secrets.token_hex(_SECRET_NBYTES).encode()
        self._folder = tempfile.TemporaryDirectory(prefix="skipper-hollow-")
        self.secret_file = Path(self._folder.name) / "secret"
        private_file.replace(self.secret_file, secret, 0o600)
        ips = [_ip_of(host) if own_ips else "127.0.0.1" for host in range(count)]
        self._programs: list[_HollowProgram] = []
        self._per_process = per_process
        try:
            for first in range(0, count, per_process):
                self._programs.append(_HollowProgram(ips[first : first + per_process], secret))
            listening = [each for program in self._programs for each in program.addresses()]
            self.addresses = [f"{addresses.SCHEME}{address}" for address in listening]
        except BaseException:
            self.close()
            raise

    def attach(self, *, timeout: float = 60.0) -> HostMesh:
        """Make them part of the job of this script, as `attach_to_hosts` does.

        Raises:
            HostError: what `attach_to_hosts` raises.
        """
        return attach_to_hosts(self.addresses, secret_file=self.secret_file, timeout=timeout)

    def kill(self, host: int) -> float:
        """Kill a host, with its agent and all processes.

        Returns:
            The time of the kill, in seconds of `time.monotonic`.

        Raises:
            IndexError: there is no such host.
            HollowHostError: its process has ended.
        """
        return self._do("kill", host)

    def kill_process(self, host: int, rank: int = 0) -> float:
        """Kill one of the processes that a host has launched; the rest as in `kill`."""
        return self._do("kill_process", host, rank=rank)

    def freeze(self, host: int) -> float:
        """Stop all communication of a host's processes, with their links still open; the rest as in `kill`."""
        return self._do("freeze", host)

    @property
    def pids(self) -> list[int]:
        """The ids of their processes."""
        return [program.pid for program in self._programs]

    def kill_all(self) -> float:
        """Kill the processes that all hosts are in; the rest as in `kill`. None of them can be attached again."""
        at_s = time.monotonic()
        for program in self._programs:
            program.kill()
        return at_s

    def usage(self) -> HostsUsage:
        """The resources that their processes use.

        Raises:
            HollowHostError: one of them has ended.
        """
        each = [program.ask({"do": "usage"}) for program in self._programs]
        sums: dict[str, Any] = {name: sum(found[name] for found in each) for name in each[0]}
        return HostsUsage(**sums)

    def cpu_s(self) -> float:
        """The CPU time that their processes have used; cheaper than `usage`, otherwise like it."""
        return float(sum(program.ask({"do": "cpu"})["cpu_s"] for program in self._programs))

    def close(self) -> None:
        """End all of them; idempotent."""
        for program in self._programs:
            program.hang_up()
        for program in self._programs:
            program.wait()
        self._programs.clear()
        self._folder.cleanup()

    def __enter__(self) -> HollowHosts:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _do(self, what: str, host: int, **more: int) -> float:
        if not 0 <= host < len(self.addresses):
            raise IndexError(f"there is no hollow host {host} among {len(self.addresses)}")
        program = self._programs[host // self._per_process]
        at_s: float = program.ask({"do": what, "host": host % self._per_process, **more})["at_s"]
        return at_s


class _HollowProgram:
    """One process of hollow hosts, seen from its parent."""

    def __init__(self, ips: list[str], secret: bytes) -> None:
        self._lock = threading.Lock()
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "skipper.control.cluster.hollow", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
            text=True,
        )
        self._write({"ips": ips, "secret": secret.hex()})

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._popen.pid

    def addresses(self) -> list[str]:
        """Where its hosts' agents listen; waits for it to start."""
        with self._lock:
            found: list[str] = self._read()["addresses"]
        return found

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        """Send it a command; returns the answer."""
        with self._lock:
            self._write(command)
            return self._read()

    def hang_up(self) -> None:
        """Make it end."""
        if self._popen.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._popen.stdin.close()

    def kill(self) -> None:
        """Send SIGKILL."""
        self._popen.kill()

    def wait(self) -> None:
        """Wait for its end; kill it if that takes too long."""
        try:
            self._popen.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        if self._popen.stdout is not None:
            self._popen.stdout.close()

    def _write(self, content: dict[str, Any]) -> None:
        assert self._popen.stdin is not None  # it is a pipe
        try:
            self._popen.stdin.write(json.dumps(content) + "\n")
            self._popen.stdin.flush()
        except (BrokenPipeError, ValueError):
            raise HollowHostError(self._ended()) from None

    def _read(self) -> dict[str, Any]:
        assert self._popen.stdout is not None  # it is a pipe
        if not (line := self._popen.stdout.readline()):
            raise HollowHostError(self._ended())
        content: dict[str, Any] = json.loads(line)
        return content

    def _ended(self) -> str:
        return f"the process of hollow hosts (pid {self._popen.pid}) has ended; its standard error says why"


def _ip_of(host: int) -> str:
    """An IP of the loopback that no other hollow host has."""
    return f"127.{64 + host // 62_500}.{host // 250 % 250 + 1}.{host % 250 + 1}"
