"""What `control.tools` offers."""

from control import tools

EXPORTED = """
    Activity ActorStatus Frame JobStatus LogOptions Logs PageServer ProcessReport ProcessStacks ProcessStatus Report
    ThreadStacks cast_command collect_logs job_stacks job_status metrics_text parked report_figures serve_metrics
"""


def test_the_exported_names_are_those_of_this_list() -> None:
    assert sorted(tools.__all__) == EXPORTED.split()
    assert all(hasattr(tools, name) for name in tools.__all__)
