"""Tools to live with a running job: its status, stacks, debugger, output and figures."""

from control.pages import PageServer
from control.runtime.figures import report_figures
from control.runtime.tables import Table, report_table
from control.tools.dashboard import Dashboard, serve_dashboard
from control.tools.debug import cast_command, parked
from control.tools.debugger import Report
from control.tools.logs import LogOptions, Logs, collect_logs
from control.tools.metrics import metrics_text, serve_metrics
from control.tools.stacks import Frame, ProcessStacks, ThreadStacks, job_stacks
from control.tools.status import (
    Activity,
    ActorStatus,
    JobStatus,
    ProcessReport,
    ProcessStatus,
    Transfers,
    job_status,
)
from control.tracing import enable_tracing, span

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
    "Report",
]
