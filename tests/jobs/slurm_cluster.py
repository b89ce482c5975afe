"""A real Slurm on this machine: munged, slurmctld, and a slurmd for each of several nodes, all in one folder.

Nothing of it touches /etc or what else of Slurm may run here: it has its own key, sockets, ports and state. The daemons
are children of the process that has started them and end with it, however that ends.
"""

import contextlib
import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

PROGRAMS = ("setpriv", "munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol")
PARTITION = "test"
URGENT = "urgent"
"""A partition of the same nodes, whose jobs preempt those of the other."""
PATIENCE_S = 30.0

_CONFIG = """\
ClusterName=skipper-test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,batch_sched_delay=0
ReturnToService=2
SlurmdTimeout=10
SlurmctldTimeout=10
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
MessageTimeout=5
InactiveLimit=0
KillWait=3
MinJobAge=300
Waittime=0
"""
"""No cgroups, which a container may not give; short bounds, so that what is lost is lost soon."""


def missing_program() -> str | None:
    """A program of Slurm that is not installed here."""
    return next((name for name in PROGRAMS if _program(name) is None), None)


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin")


@dataclass
class SlurmCluster:
    """The daemons of a cluster.

    Attributes:
        folder: where all of it lives.
        nodes: their names.
        daemons: what runs, by name.
    """

    folder: Path
    nodes: Sequence[str]
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def config(self) -> Path:
        """slurm.conf; for ``SLURM_CONF``, by which all programs of Slurm find this cluster."""
        return self.folder / "slurm.conf"

    def start(self) -> None:
        """Start everything, and wait until all nodes are idle."""
        for name in ("state", "munge.d", *(f"spool.{node}" for node in self.nodes)):
            (self.folder / name).mkdir(mode=0o700)
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        self._configure()
        munged = ["munged", "--foreground", f"--key-file={key}", f"--socket={self.folder}/munge.socket"]
        munged += [f"--pid-file={self.folder}/munge.d/pid", f"--log-file={self.folder}/munge.log"]
        munged += [f"--seed-file={self.folder}/munge.d/seed", "--num-threads=1", "--force"]
        self._start("munged", munged)
        wait_for(lambda: (self.folder / "munge.socket").exists(), "munged listens")
        self.start_controller()
        for node in self.nodes:
            self.start_node(node)
        wait_for(lambda: self.states() == {"idle"}, "the nodes are idle")

    def start_controller(self) -> None:
        """Start slurmctld, with what it remembers."""
        self._start("slurmctld", ["slurmctld", "-D", "-f", str(self.config)])

    def start_node(self, node: str) -> None:
        """Start a slurmd."""
        self._start(node, ["slurmd", "-D", "-N", node, "-f", str(self.config)])

    def kill(self, name: str) -> None:
        """End a node, with all that runs there, as a failure of its machine would."""
        self._end(name, signal.SIGKILL)
        self._end_steps([name])

    def stop_controller(self) -> None:
        """End slurmctld in good order: it saves what it knows."""
        self._end("slurmctld", signal.SIGTERM)

    def states(self) -> set[str]:
        """In which states nodes are."""
        done = self.run("sinfo", "-h", "-o", "%T", check=False)
        return {line.strip("*$~#!%@^-") for line in done.split()}

    def jobs(self) -> list[str]:
        """The ids of the jobs that pend, run, or are about to end."""
        return self.run("squeue", "-h", "-r", "-o", "%i").split()

    def run(self, *command: str, check: bool = True) -> str:
        """Run a program of Slurm for its output."""
        environment = {**os.environ, "SLURM_CONF": str(self.config)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0 or not check, f"{command}: {done.stderr}"
        return done.stdout

    def close(self) -> None:
        """End everything."""
        self._end_steps(self.nodes)
        for name in reversed(list(self.daemons)):
            self._end(name, signal.SIGTERM)
        self._end_steps(self.nodes)  # what was about to start

    def log(self) -> str:
        """What all daemons have logged."""
        return "".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self.folder.glob("*.log")))

    def _end(self, name: str, number: signal.Signals) -> None:
        daemon = self.daemons.pop(name)
        daemon.send_signal(number)
        try:
            daemon.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()

    def _start(self, name: str, command: list[str]) -> None:
        program = _program(command[0])
        assert program is not None
        with (self.folder / f"{name}.out").open("ab") as output:
            self.daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", program, *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env={**os.environ, "SLURM_CONF": str(self.config)},
                start_new_session=True,
            )

    def _configure(self) -> None:
        ports = _free_ports(1 + len(self.nodes))
        text = _CONFIG.format(host=socket.gethostname(), user=getpass.getuser(), folder=self.folder, port=ports[0])
        for number, (node, port) in enumerate(zip(self.nodes, ports[1:], strict=True)):
            address = f"127.0.0.{2 + number}"
            text += f"NodeName={node} NodeHostname={socket.gethostname()} NodeAddr={address} Port={port} CPUs=2\n"
        for name, options in ((PARTITION, "Default=YES PriorityTier=1"), (URGENT, "PriorityTier=2 PreemptMode=OFF")):
            text += f"PartitionName={name} Nodes={','.join(self.nodes)} MaxTime=INFINITE State=UP {options}\n"
        self.config.write_text(text)
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nIgnoreSystemd=yes\n")

    def _end_steps(self, nodes: Sequence[str]) -> None:
        """End what runs on nodes: it outlives their daemons."""
        running = [process for process in psutil.process_iter() if self._node_of(process) in nodes]
        steps = {parent for process in running if (parent := self._step_above(process)) is not None}
        for process in [*steps, *running]:  # a step that sees its task end would tell the controller
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _node_of(self, process: psutil.Process) -> str | None:
        """The node that a process was started on as part of a job."""
        with contextlib.suppress(psutil.Error):
            environment = process.environ()
            if environment.get("SLURM_CONF") == str(self.config):
                return environment.get("SLURMD_NODENAME")
        return None

    def _step_above(self, process: psutil.Process) -> psutil.Process | None:
        with contextlib.suppress(psutil.Error):
            parent = process.parent()
            if parent is not None and parent.name() == "slurmstepd" and parent.cwd() == str(self.folder):
                return parent
        return None


@contextlib.contextmanager
def slurm_cluster(folder: Path, nodes: int = 2) -> Iterator[SlurmCluster]:
    """A cluster that is gone afterwards, whatever happens; programs of Slurm find it by ``SLURM_CONF``."""
    cluster = SlurmCluster(folder, [f"node{number}" for number in range(nodes)])
    try:
        try:
            cluster.start()
        except AssertionError as error:
            error.add_note(cluster.log())
            raise
        yield cluster
    finally:
        cluster.close()


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Poll for something that a daemon does."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"timed out: {what}"
        time.sleep(0.05)


def _free_ports(count: int) -> list[int]:
    """Ports that nobody has, and that the kernel gives to nobody who asks for any: other tests run at the same time."""
    first_of_others = max(int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]), 12_000)
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(found) < count:
            port = first_of_others - 1 - secrets.randbelow(10_000)
            with contextlib.suppress(OSError):
                stack.enter_context(socket.socket()).bind(("", port))
                found.append(port)
    return found
