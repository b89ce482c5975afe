"""`job_status`: what a running job consists of and what it is doing, as plain data."""

from __future__ import annotations

import dataclasses
import os
import resource
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from skipper.control.api.join import visiting
from skipper.control.api.mesh import HOST_NAME
from skipper.control.observe import gpus
from skipper.control.observe.debugger import parked_actors
from skipper.control.observe.job_query import ProcessAnswer, survey
from skipper.control.runtime.history import Event
from skipper.control.runtime.latencies import EndpointLatency
from skipper.control.runtime.status_providers import Table, figures_now, tables_now
from skipper.control.wire.bulk import traffic

if TYPE_CHECKING:
    from skipper.control.runtime.actor_state import ActorState
    from skipper.control.runtime.process import Process


@dataclass(frozen=True, slots=True)
class Activity:
    """An endpoint that an actor is running, and for how many seconds.

    The example of `JobStatus` shows one.
    """

    endpoint: str
    for_s: float


@dataclass(frozen=True, slots=True)
class ActorStatus:
    """The state of one actor.

    The example of `JobStatus` shows one.

    Attributes:
        name: name of its mesh, as given to ``spawn``.
        rank: its index along each axis of the mesh.
        actor_id: unique in the job.
        class_name: class of the actor; empty before ``__init__`` has returned.
        state: ``starting``, ``idle``, ``busy``, ``parked`` (in a debugger), ``ending``.
        doing: endpoints that it is running.
        queued: number of messages that wait.
        handled: number of messages that it has handled.
        errors: number of handled messages that ended in an exception.
        last_error: the latest of these exceptions.
        latencies: times of its latest calls, by endpoint.
    """

    name: str
    rank: Mapping[str, int]
    actor_id: str
    class_name: str
    state: str
    doing: Sequence[Activity]
    queued: int
    handled: int
    errors: int
    last_error: Event | None
    latencies: Sequence[EndpointLatency] = ()

    @property
    def label(self) -> str:
        """Name and rank, as error messages show them."""
        return f"{self.name}{dict(self.rank)}" if self.rank else self.name


@dataclass(frozen=True, slots=True)
class Transfers:
    """Transfers through the data plane that a process has started itself.

    The example of `JobStatus` shows one.

    Attributes:
        in_flight: number of transfers in flight.
        done: number of transfers that succeeded.
        failed: number of transfers that failed.
        read_nbytes: bytes read by successful transfers.
        written_nbytes: bytes written by successful transfers.
    """

    in_flight: int
    done: int
    failed: int
    read_nbytes: int
    written_nbytes: int


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """What a process reports about itself.

    The example of `JobStatus` shows one.

    Attributes:
        host: name of its host.
        started_s: when it joined the job, as `time.time` counts.
        rss_nbytes: resident memory.
        cpu_s: CPU time that it has used.
        threads: number of threads.
        links: number of processes to which it is connected.
        unhandled: messages to actors of other processes that have not been credited yet.
        lent: number of large parts of messages that receivers may still read from this process.
        lent_nbytes: size of these parts.
        heard_messages: messages of any kind that it has received from other processes.
        heard_nbytes: their size, without lent parts.
        transfers: transfers through the data plane; None if the process has not used it.
        actors: actors of this process.
        deaths: the latest deaths of processes that this one launched.
        deaths_total: number of all such deaths.
        restarts: for each running process that this one launched: how many processes of that name have died before.
        errors_total: number of exceptions that left an endpoint, or ended an actor, in this process.
        errors: the latest of these exceptions.
        last_error: the last one.
        figures: figures that parts of the process report (see `report_figures`), by name of the part.
        tables: tables that they report (see `report_table`), if the caller asked for tables.
    """

    host: str
    started_s: float
    rss_nbytes: int
    cpu_s: float
    threads: int
    links: int
    unhandled: int
    lent: int
    lent_nbytes: int
    heard_messages: int
    heard_nbytes: int
    transfers: Transfers | None
    actors: Sequence[ActorStatus]
    deaths: Sequence[Event]
    deaths_total: int
    restarts: Mapping[str, int]
    errors_total: int
    errors: Sequence[Event]
    last_error: Event | None
    figures: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    tables: Sequence[Table] = ()


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """One process of the job.

    The example of `JobStatus` shows one.

    Attributes:
        id: unique id of the process.
        name: name that was given to ``spawn_procs``, with its rank; ``script`` for the script.
        pid: process id on its host; None if it is not known.
        parent_id: id of the process that launched it, or that it has joined; empty for the script.
        host: address of the attached host, or else the host's own name; empty if neither is known.
        restarts: how many processes of this name have died before.
        state: ``up``, ``silent`` or ``starting``.
        problem: why it has not answered; empty if it is up.
        report: its answer; None if there is none.
    """

    id: str
    name: str
    pid: int | None
    parent_id: str
    host: str
    restarts: int
    state: str
    problem: str
    report: ProcessReport | None


@dataclass(frozen=True, slots=True)
class JobStatus:
    """The state of a job at one moment.

    Attributes:
        job: id of the job.
        taken_s: time of this status, as `time.time` counts.
        processes: all processes, parents before children, the script first.

    Example:
        ```python
        from skipper.control import Actor, endpoint, this_host
        from skipper.control.observe import (
            Activity,
            ActorStatus,
            EndpointLatency,
            JobStatus,
            ProcessReport,
            ProcessStatus,
            Transfers,
            job_status,
        )

        class Trainer(Actor):
            @endpoint
            def step(self) -> None: ...

        trainers = this_host().spawn_procs({"gpus": 2}, name="workers").spawn("trainer", Trainer)
        trainers.step.call().get(timeout=60)

        status: JobStatus = job_status()
        script: ProcessStatus = status.processes[0]
        report: ProcessReport | None = script.report
        transfers: Transfers | None = report.transfers if report else None
        actor: ActorStatus = status.actors[0]
        doing: list[Activity] = list(actor.doing)
        latency: EndpointLatency = actor.latencies[0]
        print(status.is_healthy, script.name, script.state, actor.handled)  # True script up 1
        print(latency.endpoint, latency.calls, doing, transfers)  # step 1 [] None
        ```
    """

    job: str
    taken_s: float
    processes: Sequence[ProcessStatus]

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts that its processes run on."""
        return tuple(dict.fromkeys(process.host for process in self.processes if process.host))

    @property
    def actors(self) -> tuple[ActorStatus, ...]:
        """All actors, by process."""
        return tuple(
            actor for process in self.processes if process.report is not None for actor in process.report.actors
        )

    @property
    def deaths_total(self) -> int:
        """The number of processes that have died without having been stopped."""
        return sum(process.report.deaths_total for process in self.processes if process.report is not None)

    @property
    def last_error(self) -> Event | None:
        """The latest exception that left an endpoint, or ended an actor, in a process that still runs."""
        reports = [process.report for process in self.processes if process.report is not None]
        errors = [report.last_error for report in reports if report.last_error is not None]
        return max(errors, key=lambda event: event.at_s, default=None)

    @property
    def is_healthy(self) -> bool:
        """Whether every process answers, or is still starting."""
        return all(process.state != "silent" for process in self.processes)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data for JSON: attributes by name, and ``hosts``, ``healthy`` and ``last_error``."""
        return {
            "job": self.job,
            "taken_s": self.taken_s,
            "healthy": self.is_healthy,
            "hosts": list(self.hosts),
            "deaths_total": self.deaths_total,
            "last_error": None if self.last_error is None else dataclasses.asdict(self.last_error),
            "processes": [dataclasses.asdict(process) for process in self.processes],
        }


def job_status(address: str | os.PathLike[str] | None = None, *, timeout: float = 5.0) -> JobStatus:
    """The status of a running job of this user on this host, or of the job that this process belongs to.

    Args:
        address: as for `join`, or the name of the job's script, that script's process id, or the job's id; None: the
            job that this process belongs to, or else the only one.
        timeout: seconds after which a process that does not answer counts as silent.

    Raises:
        JoinError: as `join` says.
        DeadlineError: (a `TimeoutError`) the script itself did not answer.
        SupervisionError: the script is gone.
    """
    with visiting(address, timeout=timeout) as process:
        return status_of(survey(process, "status", timeout=timeout))


def status_of(answers: Sequence[ProcessAnswer], reports: Mapping[str, ProcessReport | None] | None = None) -> JobStatus:
    """The status from the answers of a survey.

    Args:
        answers: answers of the processes, the script's first.
        reports: their reports by the processes' ids; None: the answers are the reports.
    """
    if reports is None:
        reports = {answer.process.id: answer.value() for answer in answers}
    hosts: dict[str, str] = {}
    processes: list[ProcessStatus] = []
    for answer in answers:
        report, parent = reports[answer.process.id], reports.get(answer.parent_id)
        state = "up" if report is not None else "starting" if "not connected yet" in answer.problem else "silent"
        host = hosts[answer.process.id] = _host(answer, report, parent, hosts.get(answer.parent_id, ""))
        restarts = 0 if parent is None else parent.restarts.get(answer.process.id, 0)
        processes.append(
            ProcessStatus(
                answer.process.id,
                answer.process.name,
                answer.pid,
                answer.parent_id,
                host,
                restarts,
                state,
                answer.problem,
                report,
            )
        )
    return JobStatus(answers[0].process.job, time.time(), processes)


def _host(answer: ProcessAnswer, report: ProcessReport | None, parent: ProcessReport | None, parent_host: str) -> str:
    """Where a process runs: a child runs on the host of its parent, unless one of them says otherwise."""
    if answer.process.name.startswith(HOST_NAME):
        return answer.process.name.removeprefix(HOST_NAME)
    if report is not None and (parent is None or report.host != parent.host):
        return report.host
    return parent_host


def answer(process: Process, with_tables: bool | None) -> ProcessReport:
    """The report of this process."""
    lent, lent_nbytes = process.loans.outstanding()
    history = process.history
    children = process.children.alive()
    heard_messages, heard_nbytes = process.transport.heard()
    return ProcessReport(
        host=socket.gethostname(),
        started_s=history.started_s,
        rss_nbytes=_rss_nbytes(),
        cpu_s=time.process_time(),
        threads=threading.active_count(),
        links=process.transport.connected(),
        unhandled=process.flow.unhandled(),
        lent=lent,
        lent_nbytes=lent_nbytes,
        heard_messages=heard_messages,
        heard_nbytes=heard_nbytes,
        transfers=_transfers(),
        actors=[_actor(actor, "") for actor in process.actors.live()]
        + [_actor(actor, "ending") for actor in process.actors.ending()],
        deaths=list(history.deaths),
        deaths_total=history.deaths_total,
        restarts={child.ref.id: count for child in children if (count := history.deaths_of(child.ref.name))},
        errors_total=history.errors_total,
        errors=list(history.errors),
        last_error=history.last_error,
        figures=figures_now(),
        tables=[*tables_now(), *_tables_of_host(process)] if with_tables else (),
    )


def _tables_of_host(process: Process) -> list[Table]:
    """Tables that one process of each host reports: the script, and the process that represents the job on a host."""
    is_first = process.me.id == process.root.id or process.me.name.startswith(HOST_NAME)
    table = gpus.watch.table(socket.gethostname()) if is_first else None
    return [] if table is None else [table]


def _transfers() -> Transfers | None:
    moved = traffic()
    if moved is None:
        return None
    return Transfers(moved.in_flight, moved.done, moved.failed, moved.read_nbytes, moved.written_nbytes)


def _actor(actor: ActorState, state: str) -> ActorStatus:
    doing = [Activity(endpoint, for_s) for endpoint, for_s in actor.progress.handling()]
    if not state:
        state = "starting" if not actor.ready.done() else "busy" if doing else "idle"
        if actor.uid in parked_actors():
            state = "parked"
    assert actor.executor is not None  # actors enter the table with their executor
    return ActorStatus(
        name=actor.name,
        rank=dict(actor.rank),
        actor_id=actor.actor_id,
        class_name=actor.class_name,
        state=state,
        doing=doing,
        queued=actor.executor.depth(),
        handled=actor.progress.handled,
        errors=actor.progress.errors,
        last_error=actor.progress.last_error,
        latencies=actor.progress.latencies.summary(),
    )


def _rss_nbytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()
