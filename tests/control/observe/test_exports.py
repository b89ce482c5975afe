"""What `control.observe` offers."""

from skipper.control import observe

EXPORTED = """
    Activity ActorStatus BreakpointReport Dashboard EndpointLatency Frame JobStatus LogOptions Logs Occurrence
    PageServer ProcessReport ProcessStacks ProcessStatus Table ThreadStacks Transfers Waterfall cast_command
    collect_logs enable_tracing job_stacks job_status metrics_text parked report_figures report_occurrences
    report_table serve_dashboard serve_metrics
    shown_output span
"""


def test_the_exported_names_are_those_of_this_list() -> None:
    assert sorted(observe.__all__) == EXPORTED.split()
    assert all(hasattr(observe, name) for name in observe.__all__)
