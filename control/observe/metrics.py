"""The metrics of a job for Prometheus, at ``/metrics``, and whether it is healthy, at ``/health``."""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from importlib import resources
from pathlib import Path
from typing import Generic, TypeVar

from skipper.commandline import (
    STDOUT,
    BadArgumentsError,
    CommandParser,
    add_json,
    add_port,
    port_number,
    write_json,
)
from skipper.control.api.join import visiting
from skipper.control.model.errors import ControlError
from skipper.control.observe.job_query import survey
from skipper.control.observe.program import add_served_host, parser_of, run, serve
from skipper.control.observe.status import ActorStatus, JobStatus, ProcessReport, ProcessStatus, Transfers, status_of
from skipper.control.runtime import current_runtime
from skipper.control.support.exposition import CONTENT_TYPE, Labels, Sample, exposition
from skipper.control.support.pages import Page, PageServer
from skipper.control.support.private_file import read_secret

TIMEOUT_S = 3.0
"""How long a process has to answer; Prometheus gives up after 10 s by default."""

INTERVAL_S = 1.0

_FAMILIES = {
    "skipper_process_up": ("gauge", "1 if a process answers, 0 if it does not."),
    "skipper_process_start_time_seconds": ("gauge", "Unix time at which a process joined the job."),
    "skipper_process_cpu_seconds_total": ("counter", "CPU time that a process has used."),
    "skipper_process_resident_bytes": ("gauge", "Memory of a process that is in RAM."),
    "skipper_process_threads": ("gauge", "Threads of a process."),
    "skipper_process_links": ("gauge", "Processes that a process is connected to."),
    "skipper_process_restarts": ("gauge", "How many processes of this name have died before this one."),
    "skipper_process_deaths_total": ("counter", "Processes launched by this one that have died."),
    "skipper_process_errors_total": ("counter", "Exceptions that an endpoint raised or that ended an actor."),
    "skipper_unhandled_messages": ("gauge", "Messages sent to actors that are not yet known to be handled."),
    "skipper_lent_segments": ("gauge", "Large parts of messages in shared memory that other processes may still read."),
    "skipper_lent_bytes": ("gauge", "Size of these segments."),
    "skipper_heard_messages_total": ("counter", "Messages received from other processes."),
    "skipper_heard_bytes_total": ("counter", "Size of these messages on the wire, without segments in shared memory."),
    "skipper_transfers_in_flight": ("gauge", "Transfers of the data plane in flight."),
    "skipper_transfers_total": ("counter", "Transfers of the data plane that have ended, by result."),
    "skipper_transfer_bytes_total": ("counter", "Bytes of the transfers that succeeded, by direction."),
    "skipper_actor_queue": ("gauge", "Messages in the queue of an actor."),
    "skipper_actor_handled_total": ("counter", "Messages that an actor has handled."),
    "skipper_actor_errors_total": ("counter", "Messages of an actor whose endpoint raised an exception."),
    "skipper_actor_busy_seconds": ("gauge", "How long the oldest running endpoint of an actor has been running."),
    "skipper_actor_call_seconds": ("gauge", "Duration of the latest calls of an endpoint, by quantile."),
    "skipper_actor_state": ("gauge", "1 for the state of an actor."),
    "skipper_figure": ("gauge", "Other figures that a process reports."),
}


def metrics_text(status: JobStatus) -> str:
    """A job's status in Prometheus' text format."""
    return exposition(_FAMILIES, _samples(status))


def serve_metrics(
    port: int = 0,
    host: str = "127.0.0.1",
    *,
    timeout: float = TIMEOUT_S,
    interval: float = INTERVAL_S,
    token: str | bool | None = None,
) -> PageServer:
    """Serve the metrics of this process' job to Prometheus, at ``/metrics``, and whether it is healthy, at ``/health``.

    All processes are asked at most once per interval, however many requests come, and not at all without requests.
    ``/health`` answers with status 200 if all processes answer, and with 503 if one does not; the JSON says which.
    Clients that reach the address, and send the token if there is one, can read the names of processes and actors and
    their metrics, but nothing of any message. By default only this host reaches it.

    Args:
        port: the port to listen on; 0: a free one (see `PageServer.port`).
        host: the address to listen on; ``"0.0.0.0"`` means all addresses of this host.
        timeout: seconds to wait for the answer of a process.
        interval: how old an answer may be, in seconds, before the processes are asked again.
        token: what clients have to send, as ``Authorization: Bearer TOKEN``: a text of 16 characters or more, or True
            for a new one. None: a new one if other hosts reach the address, which always need a token; else none.

    Returns:
        The running server. It ends with the process, or by ``close()``, or as a context manager.

    Raises:
        ValueError: ``interval`` or ``timeout`` is not positive, ``token`` is false although other hosts reach the
            address, or it is not a valid token.
        OSError: the port is in use, or the address is not an address of this host.
    """
    if not 0 < timeout < float("inf"):
        raise ValueError(f"timeout is a positive number of seconds, not {timeout}")
    looks = RecentResult(lambda: status_of(survey(current_runtime.current(), "status", timeout=timeout)), interval)
    return PageServer(
        {"/metrics": lambda: Page(CONTENT_TYPE, metrics_text(looks.get())), "/health": lambda: _health(looks.get)},
        port,
        host,
        name="control-metrics",
        token=token,
    )


def _health(look: Callable[[], JobStatus]) -> Page:
    try:
        status = look()
    except ControlError as error:
        health = {"healthy": False, "problem": str(error)}
        return Page("application/json", json.dumps(health), HTTPStatus.SERVICE_UNAVAILABLE)
    silent = {process.name: process.problem for process in status.processes if process.state == "silent"}
    health = {
        "healthy": status.is_healthy,
        "processes": len(status.processes),
        "silent": silent,
        "deaths_total": status.deaths_total,
    }
    code = HTTPStatus.OK if status.is_healthy else HTTPStatus.SERVICE_UNAVAILABLE
    return Page("application/json", json.dumps(health), code)


def _samples(status: JobStatus) -> Iterator[Sample]:
    for process in status.processes:
        labels: Labels = (("process", process.name), ("pid", str(process.pid or "")))
        yield "skipper_process_up", labels, int(process.state == "up")
        yield "skipper_process_restarts", labels, process.restarts
        if process.report is not None:
            yield from _of_process(process, process.report, labels)


def _of_process(process: ProcessStatus, report: ProcessReport, labels: Labels) -> Iterator[Sample]:
    yield "skipper_process_start_time_seconds", labels, report.started_s
    yield "skipper_process_cpu_seconds_total", labels, report.cpu_s
    yield "skipper_process_resident_bytes", labels, report.rss_nbytes
    yield "skipper_process_threads", labels, report.threads
    yield "skipper_process_links", labels, report.links
    yield "skipper_process_deaths_total", labels, report.deaths_total
    yield "skipper_process_errors_total", labels, report.errors_total
    yield "skipper_unhandled_messages", labels, report.unhandled
    yield "skipper_lent_segments", labels, report.lent
    yield "skipper_lent_bytes", labels, report.lent_nbytes
    yield "skipper_heard_messages_total", labels, report.heard_messages
    yield "skipper_heard_bytes_total", labels, report.heard_nbytes
    if report.transfers is not None:
        yield from _of_transfers(report.transfers, labels)
    for part, figures in report.figures.items():
        for name, value in figures.items():
            yield "skipper_figure", (*labels, ("part", part), ("name", name)), value
    for actor in report.actors:
        yield from _of_actor(actor, (("process", process.name), ("actor", actor.actor_id), ("mesh", actor.name)))


def _of_transfers(transfers: Transfers, labels: Labels) -> Iterator[Sample]:
    yield "skipper_transfers_in_flight", labels, transfers.in_flight
    yield "skipper_transfers_total", (*labels, ("result", "done")), transfers.done
    yield "skipper_transfers_total", (*labels, ("result", "failed")), transfers.failed
    yield "skipper_transfer_bytes_total", (*labels, ("direction", "read")), transfers.read_nbytes
    yield "skipper_transfer_bytes_total", (*labels, ("direction", "written")), transfers.written_nbytes


def _of_actor(actor: ActorStatus, labels: Labels) -> Iterator[Sample]:
    yield "skipper_actor_queue", labels, actor.queued
    yield "skipper_actor_handled_total", labels, actor.handled
    yield "skipper_actor_errors_total", labels, actor.errors
    yield "skipper_actor_busy_seconds", labels, max((doing.for_s for doing in actor.doing), default=0.0)
    for known in actor.latencies:
        for quantile, seconds in (("0.5", known.p50_s), ("0.99", known.p99_s)):
            of_endpoint = (*labels, ("endpoint", known.endpoint), ("quantile", quantile))
            yield "skipper_actor_call_seconds", of_endpoint, seconds
    yield "skipper_actor_state", (*labels, ("state", actor.state)), 1


T = TypeVar("T")


class RecentResult(Generic[T]):
    """The last result of a function, or the exception that it raised, until that is ``interval_s`` old. For any thread.

    The function is called only when somebody asks. Those who ask while it runs wait for that result.

    Raises:
        ValueError: ``interval_s`` is not positive.
    """

    def __init__(self, find: Callable[[], T], interval_s: float) -> None:
        if not 0 < interval_s < float("inf"):
            raise ValueError(f"an interval is a positive number of seconds, not {interval_s}")
        self._find = find
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._taken_s = float("-inf")
        self._found: list[T] = []
        self._error: Exception | None = None

    def get(self) -> T:
        """The result, no older than the interval; raises what the function raised."""
        with self._lock:
            if time.monotonic() - self._taken_s >= self._interval_s:
                self._error = None
                try:
                    self._found = [self._find()]
                except Exception as error:  # noqa: BLE001  (it is the result for everyone who asks now)
                    self._error = error
                self._taken_s = time.monotonic()
            if self._error is not None:
                raise self._error.with_traceback(None)
            return self._found[0]


def parser(prog: str) -> CommandParser:
    """The parser of the command."""
    own = parser_of(
        prog, "Print or serve the metrics of a running job, in Prometheus' text format.", timeout_s=TIMEOUT_S
    )
    own.add_argument(
        "--serve",
        nargs="?",
        type=port_number,
        const=0,
        metavar="PORT",
        help="serve them at /metrics, and the job's health at /health, on PORT or a free port, until Ctrl-C or the end "
        "of the job",
    )
    add_served_host(own)
    add_port(own, what="the same as --serve PORT")
    add_json(own, "the status from which the metrics are computed")
    own.add_argument(
        "--grafana", action="store_true", help="print a Grafana dashboard for these metrics; it fits any job"
    )
    own.add_argument(
        "--token", action="store_true", help="require a token on 127.0.0.1 too, because this host has other users"
    )
    own.add_argument(
        "--secret-file",
        type=Path,
        metavar="FILE",
        help="file with the token to require; only you may have permission to read it",
    )
    own.add_argument("--token-file", dest="secret_file", type=Path, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return own


def main(argv: Sequence[str], *, prog: str = "skipper metrics") -> int:
    """Print or serve the figures of a job; returns the exit code."""
    return run(parser(prog), argv, _show)


def grafana_dashboard() -> str:
    """The JSON of a dashboard for Grafana, which shows the figures that Prometheus has of a job."""
    return resources.files("skipper.control.observe").joinpath("grafana.json").read_text("utf-8")


def _show(given: argparse.Namespace) -> int:
    if given.grafana:
        sys.stdout.write(grafana_dashboard())
        return 0
    token: str | bool | None = given.token or None
    if given.secret_file is not None:
        token = read_secret(given.secret_file, least_nbytes=1).decode("utf-8", "replace").strip()
    port = given.port if given.port is not None else given.serve
    if given.json is not None and port is not None:
        raise BadArgumentsError("--json writes the metrics once and --serve keeps serving them: pass one of them")
    with visiting(given.job, timeout=given.timeout) as process:
        if port is not None:
            return serve(
                process,
                lambda: serve_metrics(port, given.host, timeout=given.timeout, token=token),
                f"{given.host}:{port}",
            )
        status = status_of(survey(process, "status", timeout=given.timeout))
        write_json(status.to_dict(), given.json)
        if given.json != STDOUT:
            sys.stdout.write(metrics_text(status))
        return 0
