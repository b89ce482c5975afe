"""A real Ray cluster of two nodes on this machine: each `ray start --block` at a loopback address of its own."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.control.conftest import wait_until

PATIENCE_S = 90.0
RAY = str(Path(sys.executable).with_name("ray"))
STORE_NBYTES = 80_000_000  # Ray's least is 75 MiB
HEAD = "127.0.0.2"
LOOK_MS = 500
"""How often the head looks at a node; one that is not there for five looks is lost. Ray's own period is 3 s."""


class Node:
    """One node; its processes are those of a session, as `setsid` makes them."""

    def __init__(self, ip: str, folder: str, *options: str) -> None:
        self.ip = ip
        # Ray may have left a token in the user's home, which then only some of the nodes would ask for.
        own = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "TMPDIR": folder}
        environment = {**os.environ, **own, "RAY_health_check_period_ms": str(LOOK_MS)}
        command = [RAY, "start", "--block", "--disable-usage-stats", "--node-ip-address", ip, "--num-cpus", "2"]
        command += ["--object-store-memory", str(STORE_NBYTES), "--include-log-monitor", "false", *options]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # `close` closes it
        self._popen = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def is_up(self) -> bool:
        if self._popen.poll() is not None:
            raise RuntimeError(f"the node {self.ip} ended: {self.output()}")
        return "Ray runtime started" in self.output()

    def output(self) -> str:
        return os.pread(self._log.fileno(), 1 << 20, 0).decode()

    def processes(self) -> list[psutil.Process]:
        """All that the node has started, agents of jobs included."""
        return [process for process in psutil.process_iter() if _session(process.pid) == self._popen.pid]

    def kill(self) -> None:
        """End it at once, as by a loss of power."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        self._popen.wait()
        wait_until(lambda: not self.processes(), f"the processes of {self.ip} end")

    def close(self) -> None:
        self.kill()
        self._log.close()


class Cluster:
    """A head node, and others; a context manager.

    Attributes:
        address: as `ray.init` takes it.
        nodes: those that were started, by their IP.
    """

    def __init__(self) -> None:
        # Not pytest's folder: paths of sockets are at most 107 bytes long.
        self._folder = tempfile.mkdtemp(prefix="ray-")
        port, client, dashboard = _free_ports(3)
        self.address = f"{HEAD}:{port}"
        self.client_address = f"ray://{HEAD}:{client}"
        self.nodes: dict[str, Node] = {}
        options = ["--head", "--port", str(port), "--temp-dir", self._folder, "--ray-client-server-port", str(client)]
        options += ["--include-dashboard", "false", "--dashboard-port", str(dashboard)]
        self.nodes[HEAD] = Node(HEAD, self._folder, *options)
        self._wait(HEAD)

    def add(self, ip: str) -> Node:
        """Start another node, and wait for it."""
        self.nodes[ip] = Node(ip, self._folder, "--address", self.address)
        self._wait(ip)
        return self.nodes[ip]

    def agents(self) -> list[psutil.Process]:
        """The agents of our jobs, and what they have started."""
        found = []
        for node in self.nodes.values():
            for process in node.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if any("cluster/jobs/ray_agent" in part or "cluster/hosts/" in part for part in process.cmdline()):
                        found.append(process)
        return found

    def folders_of_agents(self) -> list[Path]:
        """Where agents keep their secret."""
        return list(Path(self._folder).glob("skipper-agent-*"))

    def close(self) -> None:
        for ip in reversed(list(self.nodes)):
            self.nodes.pop(ip).close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _wait(self, ip: str) -> None:
        try:
            wait_until(self.nodes[ip].is_up, f"the node {ip} is up", timeout=PATIENCE_S)
        except BaseException:
            self.close()
            raise


@contextlib.contextmanager
def ray_cluster() -> Iterator[Cluster]:
    """Two nodes."""
    cluster = Cluster()
    try:
        cluster.add("127.0.0.3")
        yield cluster
    finally:
        cluster.close()


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind((HEAD, 0))
        return [listener.getsockname()[1] for listener in sockets]
