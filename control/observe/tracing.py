"""`enable_tracing`: spans of OpenTelemetry for what happens in a job."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from skipper.control.model.errors import TracingMissingError
from skipper.control.observe.job_query import survey
from skipper.control.runtime import current_runtime, tracing

if TYPE_CHECKING:
    from skipper.control.observe.telemetry import Provider
    from skipper.control.runtime.process import Process

SURVEY_TIMEOUT_S = 5.0

_log = logging.getLogger("skipper.control")


def enable_tracing(provider: Provider | None = None) -> None:
    """Record spans of OpenTelemetry in this process, and in all present and future processes of its job.

    A call of an endpoint is a span at its caller, and a child of that span at each actor that handles it; the calls
    that the endpoint makes are children of the latter.

    Each process decides where its spans go: to the global tracer provider of the process, which a ``bootstrap`` of
    `HostMesh.spawn_procs` can set. If there is none, one is made from the environment variables of OpenTelemetry, such
    as ``OTEL_TRACES_EXPORTER=otlp`` and ``OTEL_SERVICE_NAME``; without the first of these, nothing is exported.

    Args:
        provider: the tracer provider of this process; None: the global one.

    Raises:
        TracingMissingError: (an `ImportError`) OpenTelemetry is not installed here.
    """
    process = current_runtime.current()
    install(process, provider)
    survey(process, "tracing", timeout=SURVEY_TIMEOUT_S)


def answer(process: Process, argument: object) -> bool:
    """For a survey: record spans in this process, too; whether it does."""
    return install_if_possible(process)


def install(process: Process, provider: Provider | None = None) -> None:
    """Record spans in this process.

    Raises:
        TracingMissingError: OpenTelemetry is not installed.
    """
    try:
        from skipper.control.observe import telemetry
    except ImportError as error:
        raise TracingMissingError(
            f"tracing needs OpenTelemetry (pip install 'skipper-mesh[tracing]'): {error}"
        ) from None
    if tracing.tracer is None or provider is not None:
        tracing.trace_by(telemetry.tracer_of(process.me.name, provider))
    if tracing.flush not in process.ending.settled:
        process.ending.settled.append(tracing.flush)


def install_if_possible(process: Process) -> bool:
    """Record spans in this process, unless it lacks OpenTelemetry, which is logged."""
    try:
        install(process)
    except TracingMissingError as error:
        _log.warning("%s: %s", process.me.name, error)
        return False
    return True
