"""Tools to live with a running job: its status, stacks, debugger, output and figures."""

from skipper.control.observe.dashboard import Dashboard, serve_dashboard
from skipper.control.observe.debugger import BreakpointReport, cast_command, parked
from skipper.control.observe.logs import LogOptions, Logs, collect_logs
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
from skipper.control.runtime.status_providers import Table, report_figures, report_table
from skipper.control.runtime.tracing import span
from skipper.control.support.pages import PageServer

__all__ = [
    # status
    "job_status",
    "JobStatus",
    "ProcessStatus",
    "ProcessReport",
    "ActorStatus",
    "Activity",
    "Transfers",
    "report_figures",
    # in a browser
    "serve_dashboard",
    "Dashboard",
    "report_table",
    "Table",
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
    # debugger
    "parked",
    "cast_command",
    "BreakpointReport",
]
