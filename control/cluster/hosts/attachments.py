"""The hosts that the script of this process has attached: its connections with their agents."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from skipper.control.cluster.hosts.agent_link import AgentLink
from skipper.control.cluster.hosts.attaching import Options, attach_one
from skipper.control.model.errors import ControlError
from skipper.control.model.future import Future, Promise
from skipper.control.runtime import current_runtime as runtime
from skipper.control.runtime.requests import PING
from skipper.control.runtime.stops import OWNED
from skipper.control.wire.certificates import REVIEW_S
from skipper.control.wire.envelope import BEATS, ProcessRef

if TYPE_CHECKING:
    from skipper.control.runtime.process import Process

MOST_AT_ONCE = 64
"""Hosts that are attached at the same time."""


class _Stoppable(Protocol):
    @property
    def has_actors(self) -> bool: ...

    def stop(self, timeout: float | None = None) -> Future[None]: ...


@dataclass(slots=True)
class Attachments:
    """What one job has attached.

    Attributes:
        process: the script's.
        agents: the connections with agents that stand.
        links: the connection with the agent of each host, and how it was attached; by the id of the host.
        successors: what has taken the place of a host that was lost, by the id of that.
        over: set when the job ends.
    """

    process: Process
    agents: set[AgentLink] = field(default_factory=set)
    links: dict[str, tuple[AgentLink, Options]] = field(default_factory=dict)
    successors: dict[str, ProcessRef] = field(default_factory=dict)
    over: threading.Event = field(default_factory=threading.Event)

    def begin(self) -> None:
        """Show the agents signs of life from now on, and tell them of the end of the job."""
        self.process.ending.after.append(self.close)
        threading.Thread(target=self._beat, name="control-agents", daemon=True).start()

    def close(self) -> None:
        """Hang up on all agents, which end what is left of the job on their hosts."""
        self.over.set()
        for link in list(self.agents):
            self.hang_up(link)

    def latest(self, host: ProcessRef) -> ProcessRef:
        """What stands for the job on a host by now."""
        while host.id in self.successors:
            host = self.successors[host.id]
        return host

    def hang_up(self, link: AgentLink) -> None:
        """End the connection with an agent, which ends what is left of the job on its host."""
        self.agents.discard(link)
        link.close()

    def _beat(self) -> None:
        while not self.over.wait(min(self.process.settings.heartbeat_s / BEATS, REVIEW_S)):
            for link in list(self.agents):
                link.review()
                link.ping()

    def attach(self, options: Options, timeout: float) -> tuple[AgentLink, ProcessRef]:
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
            # Also where it only stands still: then the agent ends it, and what it has launched.
            end.add_done_callback(lambda _: self.hang_up(link))
        return link, host


_lock = threading.Lock()
_current: Attachments | None = None


def of_this_job() -> Attachments:
    """Those of the job that runs now."""
    global _current
    process = runtime.current()
    with _lock:
        if _current is None or _current.process is not process:
            _current = Attachments(process)
            _current.begin()
        return _current


def attach_all(options: Sequence[Options], timeout: float) -> tuple[ProcessRef, ...]:
    """Attach hosts, several at once; all of them or none.

    Raises:
        HostError: the first reason why one of them could not be attached.
        AuthenticationError: an agent has another secret.
    """
    attachments = of_this_job()
    with ThreadPoolExecutor(min(MOST_AT_ONCE, len(options)), "control-attach") as pool:
        futures = [pool.submit(attachments.attach, option, timeout) for option in options]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        for future in futures:
            if future.exception() is None:
                attachments.hang_up(future.result()[0])
        raise errors[0]
    hosts = []
    for future, option in zip(futures, options, strict=True):
        link, host = future.result()
        attachments.links[host.id] = link, option
        hosts.append(host)
    return tuple(hosts)


def latest(hosts: Sequence[ProcessRef]) -> tuple[ProcessRef, ...]:
    """What stands for the job on hosts by now, as far as this process has attached them; see `HostMesh.latest`."""
    attachments = _current
    if attachments is None or attachments.process is not runtime.current():
        return tuple(hosts)
    return tuple(map(attachments.latest, hosts))


def lost(hosts: Sequence[ProcessRef], timeout: float) -> tuple[int, ...]:
    """See `HostMesh.lost`."""
    attachments = of_this_job()
    hosts = _known(attachments, hosts)
    gone = _lost(attachments, hosts, timeout)
    return tuple(position for position, host in enumerate(hosts) if host.id in gone)


def reattach(hosts: Sequence[ProcessRef], timeout: float) -> tuple[ProcessRef, ...]:
    """See `HostMesh.reattach`."""
    attachments = of_this_job()
    deadline = time.monotonic() + timeout
    hosts = _known(attachments, hosts)
    gone = _lost(attachments, hosts, timeout)
    again = {host.id: attachments.links[host.id][1] for host in hosts if host.id in gone}
    for host_id in again:
        attachments.hang_up(attachments.links[host_id][0])  # whatever is left of the job there ends with that
    fresh = attach_all(list(again.values()), max(deadline - time.monotonic(), 0)) if again else ()
    return _succeed(attachments, hosts, dict(zip(again, fresh, strict=True)))


def succeed(hosts: Sequence[ProcessRef], successors: Mapping[int, ProcessRef]) -> tuple[ProcessRef, ...]:
    """See `HostMesh.with_successors`."""
    attachments = of_this_job()
    hosts = _known(attachments, hosts)
    return _succeed(attachments, hosts, {hosts[position].id: host for position, host in successors.items()})


def _known(attachments: Attachments, hosts: Sequence[ProcessRef]) -> tuple[ProcessRef, ...]:
    """What stands for the job on these hosts by now."""
    hosts = tuple(map(attachments.latest, hosts))
    if not hosts or any(host.id not in attachments.links for host in hosts):
        raise ValueError("these hosts were not attached by this process")
    return hosts


def _lost(attachments: Attachments, hosts: Sequence[ProcessRef], timeout: float) -> set[str]:
    """The ids of those that do not answer, or whose agent does not."""
    deadline = time.monotonic() + timeout
    answers = [attachments.process.request(host, PING) for host in hosts]
    gone = set()
    for host, answer in zip(hosts, answers, strict=True):
        try:
            answer.get(max(deadline - time.monotonic(), 0))  # within the heartbeat's bound, one way or the other
        except ControlError:
            gone.add(host.id)
    return gone | {host.id for host in hosts if attachments.links[host.id][0].lost is not None}


def _succeed(
    attachments: Attachments, hosts: Sequence[ProcessRef], successors: Mapping[str, ProcessRef]
) -> tuple[ProcessRef, ...]:
    for given_up, host in successors.items():
        link, _ = attachments.links.pop(given_up)
        attachments.hang_up(link)
        attachments.successors[given_up] = host
    return tuple(successors.get(host.id, host) for host in hosts)


def stop(hosts: Sequence[ProcessRef], meshes: Sequence[_Stoppable]) -> Future[None]:
    """See `HostMesh.stop`."""
    done: Promise[None] = Promise()

    def run() -> None:
        process = runtime.current()
        deadline = time.monotonic() + process.settings.stop_timeout_s
        # The actors first: they hear of it behind what they were sent, their processes hear of it from their host.
        for has_actors in (True, False):
            left_s = OWNED * max(deadline - time.monotonic(), 0.0)
            for end in [mesh.stop(left_s) for mesh in meshes if mesh.has_actors is has_actors]:
                try:
                    end.get(max(deadline - time.monotonic(), 0.0))
                except ControlError:
                    continue  # it is dead, or does not end: the host ends it
        with contextlib.suppress(ControlError):  # those that do not end by themselves are ended by their agents
            left_s = max(deadline - time.monotonic(), 0.0)
            process.remote_launch.let_go(hosts, left_s).get(left_s)
        attachments = _current
        for host in hosts:
            if attachments is not None and (known := attachments.links.pop(host.id, None)) is not None:
                attachments.hang_up(known[0])
        done.set_result(None)

    threading.Thread(target=run, name="control-detach", daemon=True).start()
    return done
