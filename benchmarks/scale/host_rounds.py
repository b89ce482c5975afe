"""A job on a number of hosts, from the attach to deaths: what it costs the script and the hosts."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from skipper import control
from skipper.benchmarks.parent import follow_parent
from skipper.benchmarks.scale.crowd import TIMEOUT_S, Member
from skipper.benchmarks.scale.host_sources import HOLLOW, HostSource, hosts_of
from skipper.benchmarks.statistics import time_runs, timed
from skipper.control import ActorMesh, HostMesh, ProcMesh
from skipper.control.model.settings import adopt, settings
from skipper.control.runtime import current_runtime
from skipper.control.wire.payload import pack

__all__ = ["HostsFound", "HostsPlan", "RootUsage", "measure_apart", "measure_hosts"]

_RUN = 8
"""How many calls share one measurement of CPU time. A garbage collection spoils few of these measurements."""


@dataclass(frozen=True, slots=True)
class HostsPlan:
    """How much is measured at each number of hosts.

    Attributes:
        own_ips: Whether each host has an IP of its own, so that links are gRPC's between hosts.
        fanout: Fan-out of the trees.
        calls: Calls to all.
        references: Casts of a reference to all actors, to all of them.
        broadcasts: Messages to each host, without answers.
        turns: Calls to one host alone, each to another; at three times of the job.
        deaths: How many hosts are killed, and how many processes on other hosts; each at most a quarter of the hosts.
        idle_s: For how long nothing is done.
        heartbeat_s: How long a host may be silent.
        freezes: Whether an eighth of the hosts falls silent at the end, which takes the heartbeat's bound.
        message_nbytes: Size of the message that every call sends and returns.
    """

    own_ips: bool = True
    fanout: int = 8
    calls: int = 60
    references: int = 20
    broadcasts: int = 50
    turns: int = 64
    deaths: int = 20
    idle_s: float = 10.0
    heartbeat_s: float = 10.0
    freezes: bool = True
    message_nbytes: int = 100


@dataclass(frozen=True, slots=True)
class RootUsage:
    """What the script's process uses, or used more of.

    Attributes:
        cpu_s: CPU time.
        memory_nbytes: Resident.
        descriptors: Open ones.
        threads: Running ones.
        messages: Received messages, except signs of life.
        signs: Received signs of life.
        nbytes: Received bytes.
    """

    cpu_s: float
    memory_nbytes: int
    descriptors: int
    threads: int
    messages: int
    signs: int
    nbytes: int

    @staticmethod
    def now() -> RootUsage:
        """The present usage of this process."""
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        transport = current_runtime.current().transport
        messages, nbytes = transport.heard()
        signs = transport.heard_signs()
        descriptors, threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
        return RootUsage(time.process_time(), resident, descriptors, threads, messages - signs, signs, nbytes)

    def since(self, before: RootUsage) -> RootUsage:
        """The difference."""
        return RootUsage(
            self.cpu_s - before.cpu_s,
            self.memory_nbytes - before.memory_nbytes,
            self.descriptors - before.descriptors,
            self.threads - before.threads,
            self.messages - before.messages,
            self.signs - before.signs,
            self.nbytes - before.nbytes,
        )


@dataclass(slots=True)
class HostsFound:
    """What was found at one number of hosts.

    Attributes:
        label: Kind of the hosts: hollow, or measured.
        hosts: How many.
        attach_s: From the beginning of the attach to its end.
        first_s: From the spawn of a process and an actor on each to the first answers of all.
        held: What the script's process used more of once they were there.
        calls_ns: Durations of calls to all.
        called: What the script used during all of these calls.
        called_s: For how long that was.
        called_hosts_s: CPU time of the hosts during these calls.
        one_ns: Durations of calls to one host alone.
        one_cpu_ns: CPU time of the hosts for one of these, the median of several runs of them.
        one_called_ns: CPU time of the script for one of these, also the median of several runs.
        references_ns: Durations of calls to all with a reference to all.
        reference_nbytes: Size of such a reference.
        broadcasts_per_s: Messages without answers that all hosts together handled in a second.
        idle: What the script used while nothing was done, for `idle_s`.
        idle_s: For how long that was.
        idle_hosts_s: CPU time of the hosts during that time.
        process_deaths_s: From the end of a process of a host until it is known.
        deaths_s: From the end of a host until it is known.
        recovery_s: From the attach of a lost host to the first answer from a process there.
        silences_s: From the last message of an eighth of the hosts, cut off at once, until each is known as lost.
        all_deaths_s: From the end of all remaining hosts, at once, until all are known as lost.
        all_deaths_cpu_s: CPU time of the script during that time, for each of them.
    """

    label: str
    hosts: int
    attach_s: float = 0.0
    first_s: float = 0.0
    held: RootUsage | None = None
    calls_ns: list[int] = field(default_factory=list)
    called: RootUsage | None = None
    called_s: float = 0.0
    called_hosts_s: float = 0.0
    one_ns: list[int] = field(default_factory=list)
    one_cpu_ns: float = 0.0
    one_called_ns: float = 0.0
    references_ns: list[int] = field(default_factory=list)
    reference_nbytes: int = 0
    broadcasts_per_s: float = 0.0
    idle: RootUsage | None = None
    idle_s: float = 0.0
    idle_hosts_s: float = 0.0
    process_deaths_s: list[float] = field(default_factory=list)
    deaths_s: list[float] = field(default_factory=list)
    recovery_s: float | None = None
    silences_s: list[float] = field(default_factory=list)
    all_deaths_s: float | None = None
    all_deaths_cpu_s: float = 0.0

    def root_call_s(self) -> float:
        """CPU time of the script for a call to all, beyond what it uses in that time with nothing to do."""
        assert self.called is not None  # it was measured whole
        assert self.idle is not None
        return self._beyond_idle(self.called.cpu_s, self.idle.cpu_s)

    def root_call_nbytes(self) -> float:
        """Bytes to the script for a call to all, beyond those of an idle job in that time."""
        assert self.called is not None  # it was measured whole
        assert self.idle is not None
        return self._beyond_idle(self.called.nbytes, self.idle.nbytes)

    def host_call_s(self) -> float:
        """CPU time of one host for a call to all, beyond what it uses in that time with nothing to do."""
        return self._beyond_idle(self.called_hosts_s, self.idle_hosts_s) / self.hosts

    def hosts_idle_cores(self) -> float:
        """The part of a core that all hosts together use with nothing to do."""
        return self.idle_hosts_s / self.idle_s

    def _beyond_idle(self, called: float, idle: float) -> float:
        return max(called - idle * self.called_s / self.idle_s, 0.0) / len(self.calls_ns)


def measure_apart(label: str, count: int, plan: HostsPlan) -> HostsFound:
    """`measure_hosts` in a process of its own: what an earlier run has left in memory would count for this one.

    Raises:
        BenchmarkError: An agent did not start.
        ControlError: A call failed.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_measure_below, os.getpid(), label, count, plan).result()


def _measure_below(parent: int, label: str, count: int, plan: HostsPlan) -> HostsFound:
    """`measure_hosts`; when the parent ends, for any reason, an interrupt stops it, and it ends the hosts."""
    lives = follow_parent(parent, signal.SIGINT)
    try:
        if not lives:
            raise KeyboardInterrupt
        return measure_hosts(label, count, plan)
    finally:
        if os.getppid() != parent:
            os._exit(1)  # the pool would wait for more work


def measure_hosts(label: str, count: int, plan: HostsPlan) -> HostsFound:
    """Run the plan with that many hosts; as in `measure_apart`."""
    found = HostsFound(label, count)
    with hosts_of(label, count, own_ips=plan.own_ips) as source, _script(plan):
        before = RootUsage.now()
        begin = time.perf_counter()
        hosts = source.attach(timeout=TIMEOUT_S)
        found.attach_s = time.perf_counter() - begin
        procs = hosts.spawn_procs()
        members = procs.spawn("members", Member)
        members.echo.call(b"").get(TIMEOUT_S)
        found.first_s = time.perf_counter() - begin - found.attach_s
        found.held = RootUsage.now().since(before)
        ones = _OneByOne(members, source, plan)
        ones.run()
        _all(members, source, plan, found)
        ones.run()
        _references(members, plan, found)
        _broadcasts(members, plan, found)
        ones.run()
        ones.tell(found)
        _idle(source, plan, found)
        _deaths(hosts, procs, source, plan, found)
    return found


@contextmanager
def _script(plan: HostsPlan) -> Iterator[None]:
    """Be a script whose hosts may die; its job ends with the block."""
    before, hook = settings(), control.unhandled_fault_hook
    control.unhandled_fault_hook = lambda failure: None
    control.configure(tree_fanout=plan.fanout, connect_timeout_s=TIMEOUT_S, heartbeat_s=plan.heartbeat_s)
    try:
        yield
    finally:
        control.shutdown(grace_s=5.0)
        adopt(before)
        control.unhandled_fault_hook = hook


class _OneByOne:
    """Calls to one host alone, at several times of the job: the machine may be slower for some seconds."""

    def __init__(self, members: ActorMesh[Member], source: HostSource, plan: HostsPlan) -> None:
        count = members.extent.nelements
        some = [members.slice(hosts=host) for host in range(0, count, max(count // plan.turns, 1))][: plan.turns]
        self._each = [some[turn % len(some)] for turn in range(plan.turns)]
        self._source, self._message = source, bytes(plan.message_nbytes)
        self._took_ns: list[int] = []
        self._used_ns: list[float] = []
        self._hosts_used_ns: list[float] = []

    def run(self) -> None:
        """Call each of them."""
        for member in self._each * 2:  # first, links are made, and the work that this causes ends
            _ask(member, self._message)
        for first in range(0, len(self._each), _RUN):
            run = self._each[first : first + _RUN]
            before, hosts_before_s = time.process_time_ns(), self._source.cpu_s()
            self._took_ns += [timed(functools.partial(_ask, member, self._message)) for member in run]
            self._used_ns.append((time.process_time_ns() - before) / len(run))
            self._hosts_used_ns.append((self._source.cpu_s() - hosts_before_s) * 1e9 / len(run))

    def tell(self, found: HostsFound) -> None:
        """Note what was measured."""
        found.one_ns = self._took_ns
        found.one_called_ns, found.one_cpu_ns = map(statistics.median, (self._used_ns, self._hosts_used_ns))


def _ask(member: ActorMesh[Member], message: bytes) -> None:
    member.echo.call_one(message).get(TIMEOUT_S)


def _all(members: ActorMesh[Member], source: HostSource, plan: HostsPlan, found: HostsFound) -> None:
    message = bytes(plan.message_nbytes)

    def call() -> None:
        members.echo.call(message).get(TIMEOUT_S)

    for _ in range(3):  # the first opens the tree
        call()
    before, hosts_before_s = RootUsage.now(), source.cpu_s()
    found.calls_ns = time_runs(call, plan.calls)
    found.called = RootUsage.now().since(before)
    found.called_s = sum(found.calls_ns) / 1e9
    found.called_hosts_s = source.cpu_s() - hosts_before_s


def _references(members: ActorMesh[Member], plan: HostsPlan, found: HostsFound) -> None:
    found.reference_nbytes = sum(map(len, pack(members)))
    found.references_ns = time_runs(lambda: members.meet.call(members).get(TIMEOUT_S), plan.references)


def _broadcasts(members: ActorMesh[Member], plan: HostsPlan, found: HostsFound) -> None:
    message = bytes(plan.message_nbytes)
    members.noted.call().get(TIMEOUT_S)
    begin = time.perf_counter()
    for _ in range(plan.broadcasts):
        members.note.broadcast(message)
    noted = sum(members.noted.call().get(TIMEOUT_S))
    found.broadcasts_per_s = noted / (time.perf_counter() - begin)


def _idle(source: HostSource, plan: HostsPlan, found: HostsFound) -> None:
    before, hosts_before_s, begin = RootUsage.now(), source.cpu_s(), time.perf_counter()
    time.sleep(plan.idle_s)
    found.idle_s = time.perf_counter() - begin
    found.idle, found.idle_hosts_s = RootUsage.now().since(before), source.cpu_s() - hosts_before_s


def _deaths(hosts: HostMesh, procs: ProcMesh, source: HostSource, plan: HostsPlan, found: HostsFound) -> None:
    count, few = found.hosts, min(plan.deaths, found.hosts // 4)
    silent = range(max(count // 8, 1) if plan.freezes else 0)
    ended, killed = range(count - 2 * few, count - few), range(count - few, count)
    found.process_deaths_s = [_known_s(procs, [host], source.kill_process)[0] for host in ended]
    found.deaths_s = [_known_s(procs, [host], source.kill)[0] for host in reversed(killed)]
    if killed and found.label == HOLLOW:  # agents of hollow hosts are back at once
        begin = time.monotonic()
        again = hosts.slice(hosts=killed[0]).reattach(timeout=TIMEOUT_S)
        again.spawn_procs().spawn("again", Member).echo.call_one(b"").get(TIMEOUT_S)
        found.recovery_s = time.monotonic() - begin
    found.silences_s = _known_s(procs, silent, source.freeze)
    rest = range(len(silent), count - 2 * few)
    cpu_s, kill_all = time.process_time(), functools.cache(source.kill_all)
    known_s = _known_s(procs, rest, lambda _: kill_all())
    if rest:
        found.all_deaths_s = max(known_s)
        found.all_deaths_cpu_s = (time.process_time() - cpu_s) / len(rest)


def _known_s(procs: ProcMesh, hosts: Sequence[int], end: Callable[[int], float]) -> list[float]:
    """For each host, the time from its end until it is known; ``end`` ends the host and returns when it did."""
    known_s: dict[int, float] = {}
    ended = {host: procs.slice(hosts=host).ended for host in hosts}
    for host, future in ended.items():
        future.add_done_callback(functools.partial(_note_time, known_s, host))
    ended_s = {host: end(host) for host in hosts}
    for host, future in ended.items():
        future.get(TIMEOUT_S)
        known_s.setdefault(host, time.monotonic())  # the callback may come a moment later
    return [max(known_s[host] - at_s, 0.0) for host, at_s in ended_s.items()]


def _note_time(known_s: dict[int, float], host: int, _: object) -> None:
    known_s.setdefault(host, time.monotonic())
