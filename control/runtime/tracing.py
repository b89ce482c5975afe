"""Tracing: what happens in a job, told to whoever records it as spans. Nothing is, unless `enable_tracing` is called.

The runtime asks one variable, `tracer`, before each call and each message; what is behind it is
`control.observe.telemetry`, which alone knows OpenTelemetry.
"""

from __future__ import annotations

import logging
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from skipper.control.model.errors import TracingMissingError

if TYPE_CHECKING:
    from skipper.control.observe.telemetry import Provider
    from skipper.control.runtime.actor_state import ActorState
    from skipper.control.runtime.messages import ActorRef, Mail
    from skipper.control.runtime.ports import Reply
    from skipper.control.runtime.process import Process

VARIABLE = "SKIPPER_TRACING"
"""Environment variable: ``1`` where spans are to be made, from the first use on; spawned processes inherit it."""

SURVEY_TIMEOUT_S = 5.0

Attribute = str | bool | int | float

_log = logging.getLogger("skipper.control")


@dataclass(frozen=True, slots=True)
class Call:
    """What is about to be sent.

    Attributes:
        mesh: name of the actors.
        endpoint: which of their endpoints.
        is_awaited: whether somebody waits for what the endpoint returns.
        size: how many actors it is sent to.
        actor: the only one; None where there are several.
    """

    mesh: str
    endpoint: str
    is_awaited: bool
    size: int
    actor: ActorRef | None


class Sending(Protocol):
    """The span of a call, within which it is sent: an exception there ends it."""

    traceparent: bytes
    """What goes along, as the W3C's Trace Context says it."""

    def __enter__(self) -> Sending:
        """Begin to send."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """It is sent, or has not been."""

    def until(self, reply: Reply) -> Reply:
        """Have the span last until nothing more is expected there; returns what is to stand behind the port instead."""


class Span(Protocol):
    """A span within which something is done."""

    def set(self, **attributes: Attribute) -> None:
        """Say more of it."""


class Tracer(Protocol):
    """Who records spans."""

    def sending(self, call: Call) -> Sending:
        """A call of the code that runs now."""

    def serving(self, actor: ActorState, mail: Mail) -> AbstractContextManager[object]:
        """A message that an actor handles within."""

    def failed(self, error: BaseException) -> None:
        """Note that what is served now has raised."""

    def span(self, name: str, attributes: dict[str, Attribute]) -> AbstractContextManager[Span]:
        """Something that the code does which runs now."""

    def flush(self) -> None:
        """Have what was recorded exported; waits for a short while at most."""


tracer: Tracer | None = None
"""None: nothing is recorded."""


class _NoSpan:
    def __enter__(self) -> _NoSpan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None

    def set(self, **attributes: Attribute) -> None:
        """Void."""


_NO_SPAN = _NoSpan()


def span(name: str, **attributes: Attribute) -> AbstractContextManager[Span]:
    """A span of something that this process does, for parts that are no actors; nothing where tracing is off.

    It is a child of the endpoint's that runs, or of whatever span is current, and those made within are its children.

    Args:
        name: what is done, such as ``torchstore.put``.
        **attributes: of it; more can be said by ``set`` of what the context manager gives.
    """
    return _NO_SPAN if tracer is None else tracer.span(name, attributes)


def enable_tracing(provider: Provider | None = None) -> None:
    """Record spans of OpenTelemetry in this process, and in all others of its job: those that run, and those to come.

    A call of an endpoint is a span at its caller, and another one, its child, at each actor that handles it; what an
    endpoint calls in its turn is a child of that.

    What becomes of them each process decides by itself: its own tracer provider takes them, the global one of the
    process, which a ``bootstrap`` of `HostMesh.spawn_procs` may have set. Where there is none, one is made as the
    variables say that OpenTelemetry defines, such as ``OTEL_TRACES_EXPORTER=otlp`` and ``OTEL_SERVICE_NAME``; without
    the first of these, nothing is exported.

    Args:
        provider: for this process; None: the global one.

    Raises:
        TracingMissingError: (an `ImportError`) OpenTelemetry is not installed here.
    """
    from skipper.control.runtime import current_runtime

    process = current_runtime.current()
    install(process, provider)
    from skipper.control.observe.job_query import survey

    survey(process, "tracing", timeout=SURVEY_TIMEOUT_S)


def answer(process: Process, argument: object) -> bool:
    """For a survey: record spans in this process, too; whether it does."""
    return install_if_possible(process)


def install(process: Process, provider: Provider | None = None) -> None:
    """Record spans in this process.

    Raises:
        TracingMissingError: OpenTelemetry is not installed.
    """
    global tracer
    try:
        from skipper.control.observe import telemetry
    except ImportError as error:
        raise TracingMissingError(
            f"tracing needs OpenTelemetry (pip install 'skipper-mesh[tracing]'): {error}"
        ) from None
    if tracer is None or provider is not None:
        tracer = telemetry.tracer_of(process.me.name, provider)
    if _flush not in process.ending.settled:
        process.ending.settled.append(_flush)


def install_if_possible(process: Process) -> bool:
    """Record spans in this process, unless it lacks OpenTelemetry, which is logged."""
    try:
        install(process)
    except TracingMissingError as error:
        _log.warning("%s: %s", process.me.name, error)
        return False
    return True


def is_asked_for() -> bool:
    """Whether the environment says that spans are to be recorded."""
    return os.environ.get(VARIABLE, "") not in ("", "0")


def environment() -> dict[str, str]:
    """The variables by which a process that is spawned records spans as this one does: none where this one does not."""
    if tracer is None:
        return {}
    return {VARIABLE: "1", **{name: value for name, value in os.environ.items() if name.startswith("OTEL_")}}


def _flush() -> None:
    if tracer is not None:
        tracer.flush()
