"""Machines for tests: network namespaces on a bridge of this one, each with processes of its own (a pid namespace).

What runs in one has its own addresses and sees nobody else's processes or loopback; packets cross between them. Cables
can be pulled and plugged in again. Whatever happens, everything is taken down in the end.
"""

import contextlib
import fcntl
import json
import os
import signal
import socket
import string
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.control.conftest import alive
from tests.hosts.wires import Wires, wires

REPOSITORY = Path(__file__).parents[2]
PREFIX = "sk-"
_LETTERS = iter(string.ascii_lowercase)
"""One for each network of this process."""
_IP_S = 20.0
_RUN = "/run"  # where ip keeps the names of namespaces
_ETH_P_ALL = 0x0003  # linux/if_ether.h
_ENDS = slice(26, 34)  # of a packet of IPv4 in one of Ethernet: source and destination
_SO_RCVBUFFORCE = 33  # asm-generic/socket.h
_MOST_NBYTES = 1 << 17  # of a packet, where the kernel leaves segments together


class NotPermittedError(Exception):
    """This machine does not let us make network namespaces; the message says what is missing."""


@dataclass
class Machine:
    """One namespace.

    Attributes:
        name: of the namespace.
        address: its IP.
        cable: the end of its link that is in the namespace of the tests.
        bridge: what the cable is plugged into.
        processes: what was started in it.
    """

    name: str
    address: str
    cable: str
    bridge: str
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(
        self, command: Sequence[str], *, own_folder: Path | None = None, **options: object
    ) -> subprocess.Popen[str]:
        """Start a program in it, which dies with everything that it started when it is killed.

        With ``own_folder`` that folder is empty there, and nobody else sees what is put into it.
        """
        if own_folder is not None:
            command = ["sh", "-c", 'mount -t tmpfs -o mode=0700 tmpfs "$0" && exec "$@"', str(own_folder), *command]
        inside = ["ip", "netns", "exec", self.name, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        process: subprocess.Popen[str] = subprocess.Popen([*inside, *command], text=True, **options)  # type: ignore[call-overload]
        self.processes.append(process)
        return process

    def clear(self) -> None:
        """End all that was started in it."""
        for process in self.processes:
            process.kill()
            with process:  # closes its pipes
                process.wait(_IP_S)
        self.processes.clear()
        kill_all(self.name)

    def agent(self) -> int:
        """The process id of the program that was started last, in this namespace."""
        (child,) = psutil.Process(self.processes[-1].pid).children()
        return int(child.pid)

    def below_agent(self) -> list[int]:
        """The process ids of what the agent has started, in this namespace."""
        return [child.pid for child in psutil.Process(self.agent()).children() if alive(child.pid)]

    def has_zombies(self) -> bool:
        """Whether the agent has not let go of something that has ended."""
        return any(_is_zombie(child) for child in psutil.Process(self.agent()).children())

    def pull(self) -> None:
        """Cut its link."""
        ip("link", "set", self.cable, "down")

    def plug(self) -> None:
        """Heal its link."""
        ip("link", "set", self.cable, "up")

    @contextlib.contextmanager
    def without_way_to(self, address: str) -> Iterator[None]:
        """Have what it sends to an address come to nothing meanwhile."""
        ip("-n", self.name, "route", "add", "blackhole", f"{address}/32")
        try:
            yield
        finally:
            ip("-n", self.name, "route", "del", "blackhole", f"{address}/32")

    def unplug_silently(self) -> None:
        """Have what goes to it, or comes from it, get lost, without its seeing the cable pulled."""
        ip("link", "set", self.cable, "nomaster")

    def plug_silently(self) -> None:
        """Let packets through again."""
        ip("link", "set", self.cable, "master", self.bridge)

    @contextlib.contextmanager
    def slowed(self, rate: str) -> Iterator[None]:
        """Have what is sent to it come at this rate meanwhile, as in tc(8)."""
        run("tc", "qdisc", "add", "dev", self.cable, "root", "tbf", "rate", rate, "burst", "64kb", "latency", "200ms")
        try:
            yield
        finally:
            run("tc", "qdisc", "del", "dev", self.cable, "root", must=False)

    def running(self) -> list[int]:
        """What runs in it, by process ids of this namespace."""
        return [int(pid) for pid in output("ip", "netns", "pids", self.name).split()]


@dataclass
class Network:
    """Machines on a bridge, on which this process has an address, too.

    Attributes:
        bridge: its name.
        address: the IP of this process there.
        machines: the others.
        wires: what carries the packets of the machines, where that is to delay and lose them.
    """

    bridge: str
    address: str
    machines: list[Machine]
    wires: Wires | None = None


@contextlib.contextmanager
def network(count: int, *, with_wires: bool = False) -> Iterator[Network]:
    """A network of so many machines, on wires that can delay and lose packets if that is wanted.

    Raises:
        NotPermittedError: this machine has none, for want of a permission or a program.
    """
    prefix = f"{PREFIX}{os.getpid():x}-{next(_LETTERS)}"
    bridge = f"{prefix}-b"
    with contextlib.ExitStack() as stack:
        try:
            with _alone():
                sweep()
                addresses = _free_subnet()
                ip("link", "add", bridge, "type", "bridge")
                stack.callback(ip, "link", "del", bridge, must=False)
                ip("addr", "add", f"{addresses}.1/24", "dev", bridge)
            ip("link", "set", bridge, "up")
            machines = [
                _machine(stack, bridge, f"{prefix}{number}", f"{addresses}.{number + 10}", tap=with_wires)
                for number in range(count)
            ]
            ends = [(machine.name, "eth0", machine.cable) for machine in machines]
            carrier = stack.enter_context(wires(ends)) if with_wires else None
        except FileNotFoundError as error:
            raise NotPermittedError("network namespaces need the program ip (apt-get install iproute2)") from error
        except subprocess.CalledProcessError as error:
            raise NotPermittedError(
                f"network namespaces are not permitted here (they take CAP_NET_ADMIN and CAP_SYS_ADMIN): {error.stderr}"
            ) from error
        yield Network(bridge, f"{addresses}.1", machines, carrier)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Meanwhile no other process of tests on this machine sweeps, or takes addresses."""
    folder = os.open(_RUN, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _free_subnet() -> str:
    """The first three numbers of addresses that no device of this machine has."""
    devices = json.loads(output("ip", "-j", "-4", "addr", "show"))
    taken = {entry["local"].rpartition(".")[0] for device in devices for entry in device.get("addr_info", ())}
    return next(subnet for third in range(20, 220) if (subnet := f"10.77.{third}") not in taken)


def sweep() -> None:
    """Take down what runs have left that were killed."""
    left = [entry["name"] for entry in json.loads(output("ip", "-j", "netns", "list") or "[]")]
    bridges = [entry["ifname"] for entry in json.loads(output("ip", "-j", "link", "show", "type", "bridge") or "[]")]
    for name in left + bridges:
        pid = name.removeprefix(PREFIX).partition("-")[0]
        if not name.startswith(PREFIX) or Path(f"/proc/{int(pid, 16)}").exists():
            continue
        if name in bridges:
            ip("link", "del", name, must=False)
        else:
            kill_all(name)
            ip("netns", "del", name, must=False)


def _machine(stack: contextlib.ExitStack, bridge: str, name: str, address: str, *, tap: bool) -> Machine:
    ip("netns", "add", name)
    machine = Machine(name, address, f"{name}v", bridge)  # 15 characters at most, as everywhere for devices
    stack.callback(ip, "netns", "del", name, must=False)
    stack.callback(machine.clear)
    if tap:
        ip("tuntap", "add", machine.cable, "mode", "tap")
        ip("-n", name, "tuntap", "add", "eth0", "mode", "tap")
    else:
        ip("link", "add", machine.cable, "type", "veth", "peer", "name", "eth0", "netns", name)
    stack.callback(ip, "link", "del", machine.cable, must=False)
    ip("link", "set", machine.cable, "master", bridge)
    ip("link", "set", machine.cable, "up")
    ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
    ip("-n", name, "link", "set", "eth0", "up")
    ip("-n", name, "link", "set", "lo", "up")
    return machine


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:  # it was let go of since it was listed
        return False


def kill_all(namespace: str) -> None:
    """End whatever runs in a namespace."""
    for pid in output("ip", "netns", "pids", namespace).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def ip(*arguments: str, must: bool = True) -> None:
    """Run ``ip``."""
    run("ip", *arguments, must=must)


def run(*command: str, must: bool = True) -> None:
    """Run a program that is to succeed."""
    subprocess.run(command, check=must, capture_output=True, text=True, timeout=_IP_S)


def output(*command: str) -> str:
    """What a program that is to succeed says."""
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_IP_S).stdout


SKIPPER = (sys.executable, "-m", "skipper.cli.main")


class Capture:
    """Every packet on a machine's cable, in both directions, while the context lasts."""

    def __init__(self, machine: Machine) -> None:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(_ETH_P_ALL))
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 64 << 20)
        self._socket.bind((machine.cable, 0))
        self._socket.settimeout(0.1)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._packets: list[bytes] = []

    @property
    def nbytes(self) -> int:
        """How much has been seen."""
        return sum(map(len, self._packets))

    def nbytes_between(self, sender: str, receiver: str) -> int:
        """How much has been seen that one IP has sent to another."""
        ends = socket.inet_aton(sender) + socket.inet_aton(receiver)
        return sum(len(packet) for packet in self._packets if packet[_ENDS] == ends)

    def holds(self, text: bytes) -> bool:
        """Whether a packet has this in it, unencrypted."""
        return any(text in packet for packet in self._packets)

    def _read(self) -> None:
        while not self._over.is_set():
            with contextlib.suppress(OSError):  # there is none, or the cable has been pulled
                self._packets.append(self._socket.recv(_MOST_NBYTES))
        self._socket.setblocking(False)
        with contextlib.suppress(OSError):  # what had passed by then has been read
            while True:
                self._packets.append(self._socket.recv(_MOST_NBYTES))

    def __enter__(self) -> "Capture":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join(_IP_S)
        self._socket.close()
