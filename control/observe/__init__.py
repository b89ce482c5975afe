"""Tools for a running job: its status, stacks, debugger, output and metrics.

A name is imported from its module when it is first used: every script uses one of these modules, and none uses all.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skipper.control.observe.dashboard import Dashboard, serve_dashboard
    from skipper.control.observe.debugger import BreakpointReport, cast_command, parked
    from skipper.control.observe.logs import LogOptions, Logs, collect_logs, shown_output
    from skipper.control.observe.metrics import metrics_text, serve_metrics
    from skipper.control.observe.stacks import Frame, ProcessStacks, ThreadStacks, job_stacks
    from skipper.control.observe.status import (
        Activity,
        ActorStatus,
        JobStatus,
        ProcessReport,
        ProcessStatus,
        Transfers,
        job_status,
    )
    from skipper.control.observe.tracing import enable_tracing
    from skipper.control.runtime.latencies import EndpointLatency
    from skipper.control.runtime.status_providers import (
        Occurrence,
        Table,
        Waterfall,
        report_figures,
        report_occurrences,
        report_table,
    )
    from skipper.control.runtime.tracing import span
    from skipper.control.support.pages import PageServer

_MODULES = {
    "Dashboard": "skipper.control.observe.dashboard",
    "serve_dashboard": "skipper.control.observe.dashboard",
    "BreakpointReport": "skipper.control.observe.debugger",
    "cast_command": "skipper.control.observe.debugger",
    "parked": "skipper.control.observe.debugger",
    "LogOptions": "skipper.control.observe.logs",
    "Logs": "skipper.control.observe.logs",
    "collect_logs": "skipper.control.observe.logs",
    "shown_output": "skipper.control.observe.logs",
    "metrics_text": "skipper.control.observe.metrics",
    "serve_metrics": "skipper.control.observe.metrics",
    "Frame": "skipper.control.observe.stacks",
    "ProcessStacks": "skipper.control.observe.stacks",
    "ThreadStacks": "skipper.control.observe.stacks",
    "job_stacks": "skipper.control.observe.stacks",
    "Activity": "skipper.control.observe.status",
    "ActorStatus": "skipper.control.observe.status",
    "JobStatus": "skipper.control.observe.status",
    "ProcessReport": "skipper.control.observe.status",
    "ProcessStatus": "skipper.control.observe.status",
    "Transfers": "skipper.control.observe.status",
    "job_status": "skipper.control.observe.status",
    "enable_tracing": "skipper.control.observe.tracing",
    "EndpointLatency": "skipper.control.runtime.latencies",
    "Occurrence": "skipper.control.runtime.status_providers",
    "Table": "skipper.control.runtime.status_providers",
    "Waterfall": "skipper.control.runtime.status_providers",
    "report_figures": "skipper.control.runtime.status_providers",
    "report_occurrences": "skipper.control.runtime.status_providers",
    "report_table": "skipper.control.runtime.status_providers",
    "span": "skipper.control.runtime.tracing",
    "PageServer": "skipper.control.support.pages",
}

__all__ = [
    # status
    "job_status",
    "JobStatus",
    "ProcessStatus",
    "ProcessReport",
    "ActorStatus",
    "Activity",
    "EndpointLatency",
    "Transfers",
    "report_figures",
    # in a browser
    "serve_dashboard",
    "Dashboard",
    "report_table",
    "Table",
    "Waterfall",
    # in the record of a run
    "report_occurrences",
    "Occurrence",
    # spans
    "enable_tracing",
    "span",
    # figures
    "serve_metrics",
    "metrics_text",
    "PageServer",
    # stacks
    "job_stacks",
    "ProcessStacks",
    "ThreadStacks",
    "Frame",
    # output
    "collect_logs",
    "Logs",
    "LogOptions",
    "shown_output",
    # debugger
    "parked",
    "cast_command",
    "BreakpointReport",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
