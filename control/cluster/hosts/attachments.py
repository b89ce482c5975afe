"""The hosts that this process' script has attached: its connections with their agents."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from skipper.control.api.mesh import HOST_NAME, keeps_hosts
from skipper.control.cluster.hosts import protocol
from skipper.control.cluster.hosts.agent_link import AgentLink
from skipper.control.model.errors import ControlError, HostUnreachableError
from skipper.control.model.progress import ProgressTask, track_progress
from skipper.control.runtime import current_runtime as runtime
from skipper.control.runtime.requests import PING
from skipper.control.wire.addresses import at
from skipper.control.wire.certificates import REVIEW_S, Certificates
from skipper.control.wire.process_ref import BEATS, ProcessRef

if TYPE_CHECKING:
    from skipper.control.runtime.process import Process

MOST_AT_ONCE = 64
"""How many hosts are attached at the same time."""


@dataclass(frozen=True, slots=True)
class AttachOptions:
    """Options for attaching a host.

    Attributes:
        host: its IP.
        port: the port of its agent.
        secret: the agent's secret.
        certificates: for TLS; None: no TLS.
        open_data_plane: whether the data plane, which does not encrypt, may be used with other hosts.
    """

    host: str
    port: int
    secret: bytes
    certificates: Certificates | None
    open_data_plane: bool

    def __repr__(self) -> str:
        return f"<{at(self.host, self.port)}>"  # never the secret


def attach_one(process: Process, link: AgentLink, options: AttachOptions, timeout: float) -> ProcessRef:
    """Make an agent start a process for the job, and connect to that process.

    Raises:
        HostError: it cannot be reached, or the agent refuses.
    """
    deadline = time.monotonic() + timeout
    me = runtime.new_process_ref(f"{HOST_NAME}{at(options.host, options.port)}", process.me)
    nonce = protocol.new_nonce()
    content = {
        "versions": protocol.versions(),
        "me": {"id": me.id, "name": me.name, "host": options.host},
        "root": {"id": process.me.id, "address": process.me.address, "name": process.me.name},
        "nonce": nonce.hex(),
        "masked_secret": protocol.mask(process.secret, options.secret, nonce).hex(),
        "settings": dataclasses.asdict(process.settings),
        "sys_path": [os.path.abspath(entry) for entry in sys.path],
        "open_data_plane": options.open_data_plane,
    }
    there = link.ask("attach", content, timeout=max(deadline - time.monotonic(), 0))
    host = ProcessRef(me.id, str(there["address"]), me.name, process.me)
    process.remote_launch.attached(host)
    try:
        process.request(host, PING).get(max(deadline - time.monotonic(), 0))
        if process.state.redirection is not None and process.state.redirection.sink:
            from skipper.control.observe import job_query  # few jobs attach hosts while their logs are read

            job_query.ask_below(
                process, host, "logs", process.state.redirection, timeout=max(deadline - time.monotonic(), 0)
            )
    except ControlError as error:
        raise HostUnreachableError(f"the job's process on {options!r} cannot be reached: {error}") from error
    return host


@dataclass(slots=True)
class Attachments:
    """The hosts that one job has attached.

    Attributes:
        process: the script's process.
        agents: the open connections with agents.
        links: the connection with the agent of each host, and how it was attached; by the id of the host.
        successors: the hosts that have replaced lost ones, by the id of the lost one.
        over: set when the job ends.
    """

    process: Process
    agents: set[AgentLink] = field(default_factory=set)
    links: dict[str, tuple[AgentLink, AttachOptions]] = field(default_factory=dict)
    successors: dict[str, ProcessRef] = field(default_factory=dict)
    over: threading.Event = field(default_factory=threading.Event)

    def begin(self) -> None:
        """Send heartbeats to the agents from now on, and report the end of the job to them."""
        self.process.ending.after.append(self.close)
        threading.Thread(target=self._beat, name="control-agents", daemon=True).start()

    def close(self) -> None:
        """Close the connections with all agents, which then end the rest of the job on their hosts."""
        self.over.set()
        for link in list(self.agents):
            self.hang_up(link)

    def latest(self, host: ProcessRef) -> ProcessRef:
        """The job's present process on a host: that of the host, or of its successor."""
        while host.id in self.successors:
            host = self.successors[host.id]
        return host

    def hang_up(self, link: AgentLink) -> None:
        """Close the connection with an agent, which then ends the rest of the job on its host."""
        self.agents.discard(link)
        link.close()

    def _beat(self) -> None:
        interval_s = self.process.settings.unresponsive() / BEATS
        due_s = 0.0
        while not self.over.wait(min(interval_s, REVIEW_S)):
            if is_due := time.monotonic() >= due_s:
                due_s = time.monotonic() + interval_s
            for link in list(self.agents):
                link.review()
                if is_due:
                    link.ping()

    def attach(self, options: AttachOptions, timeout: float) -> tuple[AgentLink, ProcessRef]:
        """Attach a host.

        Raises:
            HostError: it cannot be reached, or refuses.
            AuthenticationError: its agent has another secret.
        """
        deadline = time.monotonic() + timeout
        link = AgentLink(options.host, options.port, options.secret, options.certificates, timeout=timeout)
        self.agents.add(link)
        try:
            host = attach_one(self.process, link, options, max(deadline - time.monotonic(), 0))
        except BaseException:
            self.hang_up(link)
            raise
        if (end := self.process.remote_launch.end_of(host.id)) is not None:
            # Even if it has only stopped answering: the agent then ends it, and what it has launched.
            end.add_done_callback(lambda _: self.hang_up(link))
        return link, host

    def attach_all(self, options: Sequence[AttachOptions], timeout: float) -> tuple[ProcessRef, ...]:
        """Attach hosts, several at once; all of them or none.

        Raises:
            HostError: the first reason why one of them could not be attached.
            AuthenticationError: an agent has another secret.
        """
        names = [at(option.host, option.port) for option in options]
        with (
            track_progress("attach hosts", len(options), "hosts", names=names) as task,
            ThreadPoolExecutor(min(MOST_AT_ONCE, len(options)), "control-attach") as pool,
        ):
            futures = [pool.submit(self.attach, option, timeout) for option in options]
            for future, name in zip(futures, names, strict=True):
                future.add_done_callback(functools.partial(_count, task, name))
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            for future in futures:
                if future.exception() is None:
                    self.hang_up(future.result()[0])
            raise errors[0]
        hosts = []
        for future, option in zip(futures, options, strict=True):
            link, host = future.result()
            self.links[host.id] = link, option
            hosts.append(host)
        return tuple(hosts)

    def lost(self, hosts: Sequence[ProcessRef], timeout: float) -> tuple[int, ...]:
        """See `HostMesh.lost`."""
        hosts = self._known(hosts)
        gone = self._lost(hosts, timeout)
        return tuple(position for position, host in enumerate(hosts) if host.id in gone)

    def reattach(self, hosts: Sequence[ProcessRef], timeout: float) -> tuple[ProcessRef, ...]:
        """See `HostMesh.reattach`."""
        deadline = time.monotonic() + timeout
        hosts = self._known(hosts)
        gone = self._lost(hosts, timeout)
        again = {host.id: self.links[host.id][1] for host in hosts if host.id in gone}
        for host_id in again:
            self.hang_up(self.links[host_id][0])  # that ends the rest of the job there
        fresh = self.attach_all(list(again.values()), max(deadline - time.monotonic(), 0)) if again else ()
        return self._succeed(hosts, dict(zip(again, fresh, strict=True)))

    def succeed(self, hosts: Sequence[ProcessRef], successors: Mapping[int, ProcessRef]) -> tuple[ProcessRef, ...]:
        """See `HostMesh.with_successors`."""
        hosts = self._known(hosts)
        return self._succeed(hosts, {hosts[position].id: host for position, host in successors.items()})

    def forget(self, hosts: Sequence[ProcessRef]) -> None:
        """Close the connections with the agents of hosts that the job has released."""
        for host in hosts:
            if (known := self.links.pop(host.id, None)) is not None:
                self.hang_up(known[0])

    def _known(self, hosts: Sequence[ProcessRef]) -> tuple[ProcessRef, ...]:
        """The job's present processes on these hosts."""
        hosts = tuple(map(self.latest, hosts))
        if not hosts or any(host.id not in self.links for host in hosts):
            raise ValueError("these hosts were not attached by this process")
        return hosts

    def _lost(self, hosts: Sequence[ProcessRef], timeout: float) -> set[str]:
        """The ids of the hosts that do not answer, or whose agent does not."""
        deadline = time.monotonic() + timeout
        answers = [self.process.request(host, PING) for host in hosts]
        gone = set()
        for host, answer in zip(hosts, answers, strict=True):
            try:
                answer.get(max(deadline - time.monotonic(), 0))  # within the heartbeat's bound it answers or is lost
            except ControlError:
                gone.add(host.id)
        return gone | {host.id for host in hosts if self.links[host.id][0].lost is not None}

    def _succeed(self, hosts: Sequence[ProcessRef], successors: Mapping[str, ProcessRef]) -> tuple[ProcessRef, ...]:
        for given_up, host in successors.items():
            link, _ = self.links.pop(given_up)
            self.hang_up(link)
            self.successors[given_up] = host
        return tuple(successors.get(host.id, host) for host in hosts)


def _count(task: ProgressTask, name: str, attached: concurrent.futures.Future[Any]) -> None:
    """Note that a host is attached."""
    if attached.exception() is None:
        task.advance(name=name)


_lock = threading.Lock()
_current: Attachments | None = None


def of_this_job() -> Attachments:
    """The attachments of the running job."""
    global _current
    process = runtime.current()
    with _lock:
        if _current is None or _current.process is not process:
            _current = Attachments(process)
            _current.begin()
            keeps_hosts(_current)
        return _current
