"""Registers functions of the upper layers of `control` with the lower ones; costly imports come later.

Several threads may be the first to need the tools at once. So every such import names the package first, `from package
import module`. With `from package.module import name`, a thread holds the module while it waits for the package;
another thread may hold the package while it waits for the module. Python ends that deadlock by giving one of them an
incomplete module.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from skipper.control.api import announced, context, join
from skipper.control.api.service import ServiceTemplate, starts_services
from skipper.control.model.failure import MeshFailure
from skipper.control.model.future import Promise
from skipper.control.runtime import breakpoints, current_runtime, progress_reports, supervision, tracing
from skipper.control.runtime import context as runtime_context
from skipper.control.runtime.messages import Mail
from skipper.control.runtime.process import Process


def register(find_fault_hook: Callable[[], Callable[[MeshFailure], object]]) -> None:
    """Register everything; ``find_fault_hook`` returns what users may have assigned to `unhandled_fault_hook`."""
    supervision.find_hook_by(find_fault_hook)
    starts_services(_start_service)
    runtime_context.make_with(context.ActorInstance, context.Context)
    breakpoints.park_by(_park)
    current_runtime.extend(_serve_tools)
    current_runtime.at_start(_show_output)
    current_runtime.at_start(_report_progress)
    current_runtime.at_start(_trace_if_asked_to)
    current_runtime.at_start(announced.announce)
    current_runtime.at_start(join.serve_if_asked_to)
    current_runtime.at_start(_record_if_asked_to)
    join.reach_beyond_by(_remote_jobs)


def _park(frame: FrameType) -> None:
    from skipper.control.observe import debugger

    debugger.park(frame)


def _show_output(process: Process) -> None:
    """In a script; the other processes got the place for their output from the process that launched them."""
    if process.root.id == process.me.id:
        from skipper.control.observe import logs

        logs.show_output(process)


def _report_progress(process: Process) -> None:
    """A script shows progress, if it has a terminal; the others report to the script, if they know it."""
    if process.root.id == process.me.id:
        from skipper.control.observe import terminal_line

        if not progress_reports.is_off() and terminal_line.is_shown():
            from skipper.control.observe import progress_line

            progress_line.show(process)
    elif progress_reports.is_to_tell():
        progress_reports.tell_script(process)


def _trace_if_asked_to(process: Process) -> None:
    if tracing.is_asked_for():
        from skipper.control.observe import tracing as tracer

        tracer.install_if_possible(process)


def _record_if_asked_to(process: Process) -> None:
    folder = os.environ.get("SKIPPER_RECORD")
    if folder and process.root.id == process.me.id:
        from skipper.control.observe import script_record

        script_record.begin(process, folder)


def _serve_tools(process: Process) -> None:
    """Make a process answer the requests of tools; most processes never get one, and import none of this."""
    requests = process.requests

    def survey(mail: Mail) -> None:
        """Answer a question that every process of the job is asked, on a thread of its own: that may take long."""

        def work() -> None:
            from skipper.control.observe import job_query

            job_query.serve(process, mail)

        threading.Thread(target=work, name="control-survey", daemon=True).start()

    def output(mail: Mail) -> None:
        from skipper.control.observe import log_forwarder

        requests.run(log_forwarder.OUTPUT, log_forwarder.take, mail)

    def flush_output(mail: Mail) -> None:
        from skipper.control.observe import log_forwarder

        requests.run(log_forwarder.FLUSH_OUTPUT, log_forwarder.flushed, mail)

    def serve(mail: Mail) -> None:
        """Let other tools into the job, for a user who will need them; answers with the name of the job."""
        from skipper.control.observe import debugger

        name: Promise[str] = Promise()
        requests.answer(mail, name)
        # It reads files and connects to sockets.
        threading.Thread(
            target=name.settle_by, args=(debugger.serve_this_job,), name="control-serve", daemon=True
        ).start()

    def progress(mail: Mail) -> None:
        from skipper.control.observe import progress_line

        requests.run(progress_reports.PROGRESS, progress_line.take, mail)

    def job_ending(mail: Mail) -> None:
        from skipper.control.observe import script_record

        requests.run(script_record.JOB_ENDING, script_record.attached, mail)

    def last_look(mail: Mail) -> None:
        from skipper.control.observe import script_record

        requests.run(script_record.LAST_LOOK, script_record.looked, mail)

    requests.serve_by_name("survey", survey)
    requests.serve_by_name("progress", progress)
    requests.serve_by_name("output", output)
    requests.serve_by_name("flush_output", flush_output)
    requests.serve_by_name("serve", serve)
    requests.serve_by_name("job_ending", job_ending)
    requests.serve_by_name("last_look", last_look)


def _start_service(
    template: ServiceTemplate[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], name: str | None
) -> Any:
    from skipper.control.services import service  # most processes start no services

    return service.start_service(template, args, kwargs, name)


def _remote_jobs() -> Any:
    from skipper.control.cluster.hosts import job_gate  # few processes deal with other hosts' jobs

    return job_gate.RemoteJobs()
