"""What `control.tools` offers."""

from control import tools

EXPORTED = """
    Activity ActorStatus Dashboard Frame JobStatus LogOptions Logs PageServer ProcessReport ProcessStacks ProcessStatus
    Report Table ThreadStacks Transfers cast_command collect_logs enable_tracing job_stacks job_status metrics_text
    parked report_figures report_table serve_dashboard serve_metrics span
"""


def test_the_exported_names_are_those_of_this_list() -> None:
    assert sorted(tools.__all__) == EXPORTED.split()
    assert all(hasattr(tools, name) for name in tools.__all__)
