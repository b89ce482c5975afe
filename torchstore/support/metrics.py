"""The totals of this process' puts and gets: the last records of each store, and counters for Prometheus.

They are kept by store name, so a new client continues the counts. Prometheus fetches them over HTTP.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from threading import Lock

from skipper.control.runtime.status_providers import (
    Entry,
    Occurrence,
    Table,
    Waterfall,
    report_figures,
    report_occurrences,
    report_table,
)
from skipper.control.support.exposition import CONTENT_TYPE, Labels, exposition
from skipper.control.support.pages import Page, PageServer
from skipper.torchstore.support.records import STAGES, SyncRecord

KEPT_RECORDS = 256

BUCKETS_S = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Upper bounds of the histogram of durations: half decades, from the put of a small value to a hanging job."""

Samples = Iterator[tuple[str, Labels, float]]


@dataclass(slots=True)
class _Series:
    """The totals of one kind of operation in one mode."""

    buckets: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    seconds: float = 0.0
    stages: list[float] = field(default_factory=lambda: [0.0] * len(STAGES))
    nbytes: int = 0
    saved_nbytes: int = 0
    lent_nbytes: int = 0
    segments: int = 0
    messages: int = 0
    hits: int = 0
    compiled: int = 0
    ended: float = 0.0

    def add(self, record: SyncRecord) -> None:
        self.buckets[bisect_left(BUCKETS_S, record.seconds)] += 1
        self.seconds += record.seconds
        self.messages += record.control_calls
        self.ended = record.ended
        if record.mode == "inline":  # the shortest path has one stage and moves only the message
            self.stages[1] += record.control_s
            return
        for number, spent_s in enumerate(record.stages.values()):
            self.stages[number] += spent_s
        self.nbytes += record.nbytes
        self.saved_nbytes += record.saved_nbytes
        self.lent_nbytes += record.lent_nbytes
        self.segments += record.segments
        if record.plan_hit:
            self.hits += 1
        else:
            self.compiled += 1


class SyncLog:
    """The operations of one process on one store. Thread-safe."""

    def __init__(self) -> None:
        self._records: deque[SyncRecord] = deque(maxlen=KEPT_RECORDS)
        self._series: dict[tuple[str, str], _Series] = {}
        self._errors: dict[tuple[str, str], int] = {}
        self._lock = Lock()

    def add(self, record: SyncRecord) -> None:
        """Keep the record of a finished operation."""
        with self._lock:
            self._records.append(record)
            series = self._series.get((record.op, record.mode))
            if series is None:
                series = self._series[record.op, record.mode] = _Series()
            series.add(record)

    def failed(self, op: str, error: Exception) -> None:
        """Count an operation that ended in an error."""
        with self._lock:
            kind = (op, type(error).__name__)
            self._errors[kind] = self._errors.get(kind, 0) + 1

    def records(self) -> tuple[SyncRecord, ...]:
        """The last records, oldest first."""
        with self._lock:
            return tuple(self._records)

    def totals(self) -> dict[str, float]:
        """Operations by name, errors, and tensor bytes moved."""
        totals: dict[str, float] = {}
        with self._lock:
            for (op, _), series in self._series.items():
                totals[f"{op}s"] = totals.get(f"{op}s", 0) + sum(series.buckets)
                totals["bytes"] = totals.get("bytes", 0) + series.nbytes
            totals["errors"] = sum(self._errors.values())
        return totals

    def samples(self, store: str) -> Samples:
        """Every figure as (metric, labels, value), in no particular order of metrics."""
        with self._lock:
            for (op, mode), series in self._series.items():
                yield from _samples(series, (("store", store), ("op", op), ("mode", mode)))
            for (op, error), number in self._errors.items():
                yield "torchstore_errors_total", (("store", store), ("op", op), ("error", error)), number
            # Only of the kept records, so that the number of keys is bounded.
            newest = {(record.op, record.key): record.version for record in self._records if record.mode != "inline"}
        for (op, key), version in newest.items():
            yield "torchstore_version", (("store", store), ("op", op), ("key", key)), version


def _samples(series: _Series, labels: Labels) -> Samples:
    name = "torchstore_sync_duration_seconds"
    bounds = [*(f"{bound:g}" for bound in BUCKETS_S), "+Inf"]
    counts = list(accumulate(series.buckets))
    for bound, count in zip(bounds, counts, strict=True):
        yield f"{name}_bucket", (*labels, ("le", bound)), count
    yield f"{name}_sum", labels, series.seconds
    yield f"{name}_count", labels, counts[-1]
    for stage, spent_s in zip(STAGES, series.stages, strict=True):
        yield "torchstore_sync_stage_seconds_total", (*labels, ("stage", stage)), spent_s
    yield "torchstore_sync_bytes_total", labels, series.nbytes
    yield "torchstore_sync_saved_bytes_total", labels, series.saved_nbytes
    yield "torchstore_sync_lent_bytes_total", labels, series.lent_nbytes
    yield "torchstore_sync_segments_total", labels, series.segments
    yield "torchstore_control_messages_total", labels, series.messages
    yield "torchstore_plans_total", (*labels, ("result", "hit")), series.hits
    yield "torchstore_plans_total", (*labels, ("result", "compiled")), series.compiled
    yield "torchstore_last_sync_timestamp_seconds", labels, series.ended


_logs: dict[str, SyncLog] = {}
_logs_lock = Lock()


def log_of(store_name: str) -> SyncLog:
    """The operations of this process on a store; the same object for the life of the process."""
    with _logs_lock:
        if not _logs:
            report_figures("torchstore", _totals)
            report_table("torchstore syncs", _syncs)
            report_occurrences("torchstore", _since)
        return _logs.setdefault(store_name, SyncLog())


def _since(at_s: float) -> list[Occurrence]:
    """The syncs of all stores, for the record of the job, without small values, which the controller itself stores."""
    with _logs_lock:
        logs = list(_logs.items())
    found = [
        Occurrence(record.ended, f"{record.op} {record.key} version {record.version}", _figures_of(store, record))
        for store, log in logs
        for record in log.records()
        if record.ended >= at_s and record.mode != "inline"
    ]
    return sorted(found, key=lambda sync: sync.at_s)


def _figures_of(store: str, record: SyncRecord) -> dict[str, str | float | None]:
    stages = {f"{stage}_s": spent_s for stage, spent_s in record.stages.items()}
    return {"store": store, "mode": record.mode, "nbytes": record.nbytes, "seconds": record.seconds, **stages}


def _totals() -> dict[str, float]:
    """The totals of all stores, for the status of the job."""
    with _logs_lock:
        logs = list(_logs.values())
    totals: dict[str, float] = {"errors": 0, "bytes": 0}
    for log in logs:
        for name, number in log.totals().items():
            totals[name] = totals.get(name, 0) + number
    return totals


_SHOWN_SYNCS = 16
_WATERFALL = Waterfall("version", "began", (*STAGES, "rest"))


def _syncs() -> Table | None:
    """The latest puts and gets by stage, to watch the job; small values, which have no stages, are left out."""
    with _logs_lock:
        logs = list(_logs.items())
    rows: list[tuple[Entry, ...]] = [
        (
            f"{store} {record.key} v{record.version}",
            record.op,
            record.nbytes,
            record.ended - record.seconds,
            *_spent(record),
        )
        for store, log in logs
        for record in [record for record in log.records() if record.mode != "inline"][-_SHOWN_SYNCS:]
    ]
    columns = ("version", "what", "bytes", "began", *_WATERFALL.stages)
    return Table("Syncs", columns, rows, waterfall=_WATERFALL) if rows else None


def _spent(record: SyncRecord) -> list[float]:
    stages = list(record.stages.values())
    return [*stages, max(record.seconds - sum(stages), 0.0)]


def metrics_text(store_name: str | None = None) -> str:
    """This process' counters in Prometheus' text format, to serve at ``/metrics`` or to write to a file.

    Args:
        store_name: One store; None: all that this process has used.

    Returns:
        Lines of text, version 0.0.4 of the format (``Content-Type: text/plain; version=0.0.4``).
    """
    with _logs_lock:
        chosen = {name: log for name, log in _logs.items() if store_name in (None, name)}
    return exposition(_FAMILIES, (sample for name, log in chosen.items() for sample in log.samples(name)))


_FAMILIES = {
    "torchstore_sync_duration_seconds": ("histogram", "How long puts and gets took, including waits."),
    "torchstore_sync_stage_seconds_total": ("counter", "That time, by stage."),
    "torchstore_sync_bytes_total": ("counter", "Tensor bytes moved by this process."),
    "torchstore_sync_saved_bytes_total": ("counter", "Bytes that a delta did not have to move."),
    "torchstore_sync_lent_bytes_total": ("counter", "Bytes moved that came from another reader's copy."),
    "torchstore_sync_segments_total": ("counter", "Contiguous runs copied, after coalescing."),
    "torchstore_control_messages_total": ("counter", "Messages sent to the store's controller and volumes."),
    "torchstore_plans_total": ("counter", "Operations that replayed a plan, and those that compiled one."),
    "torchstore_errors_total": ("counter", "Puts and gets that ended in an error."),
    "torchstore_version": ("gauge", "The version of a key that was put or got last."),
    "torchstore_last_sync_timestamp_seconds": ("gauge", "When the last put or get ended."),
}


MetricsServer = PageServer
"""Answers ``GET /metrics`` from a thread of its own until it is closed; `serve_metrics` makes one."""


def serve_metrics(
    port: int = 0, host: str = "127.0.0.1", *, store_name: str | None = None, token: str | bool | None = None
) -> PageServer:
    """Serve `metrics_text` to Prometheus: ``http://HOST:PORT/metrics``.

    Clients that reach the address, and send the token if there is one, can read it. It has figures and the names of
    stores and keys, but no values. By default only this host reaches it.

    Args:
        port: The port to listen on; 0: a free one (see `MetricsServer.port`).
        host: The address to listen on; ``"0.0.0.0"`` means all addresses of this host.
        store_name: One store; None: all that this process uses.
        token: What clients have to send, as ``Authorization: Bearer TOKEN``: a text of 16 characters or more, or True
            for a new one. None: a new one if other hosts reach the address, which always need a token; else none.

    Returns:
        The running server. It takes a thread and ends with the process, or by ``close()``, or as a context manager.

    Raises:
        ValueError: ``token`` is false although other hosts reach the address, or it is not a valid token.
        OSError: The port is in use, or the address is not an address of this host.
    """
    return PageServer(
        {"/metrics": lambda: Page(CONTENT_TYPE, metrics_text(store_name))},
        port,
        host,
        name="torchstore-metrics",
        token=token,
    )
