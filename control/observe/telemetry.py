"""Spans of OpenTelemetry for `control.runtime.tracing`; the only file that imports it.

Names of spans and attributes follow its semantic conventions for remote procedure calls.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import entry_points
from types import TracebackType
from typing import TYPE_CHECKING, Any

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from skipper.control.model.endpoint_spec import WRAPPED
from skipper.control.model.exception_text import class_name, describe, message_of, summarize
from skipper.control.runtime.tracing import Attribute, TracedActor, TracedCall
from skipper.control.wire.messages import Kind, Payload

if TYPE_CHECKING:
    from skipper.control.model.errors import LinkError
    from skipper.control.model.shape import Point
    from skipper.control.runtime.interfaces import ReplyHandler
    from skipper.control.runtime.messages import Loss, Mail

FLUSH_TIMEOUT_S = 2.0
"""How long a process that ends waits for the export of its last spans: a collector may be unreachable."""

EXPORTER_VARIABLE = "OTEL_TRACES_EXPORTER"
_EXPORTERS = "opentelemetry_traces_exporter"
"""The group of entry points in which packages name their exporters, as OpenTelemetry's configuration has it."""

_PARENT = "traceparent"

Provider = trace.TracerProvider

_log = logging.getLogger("skipper.control")
_propagator = TraceContextTextMapPropagator()


def tracer_of(process_name: str, provider: Provider | None) -> OpenTelemetryTracer:
    """The recorder of spans by a provider, or by the global one, which the environment configures."""
    if provider is None:
        provider = trace.get_tracer_provider()
        if isinstance(provider, trace.ProxyTracerProvider) and (made := _provider(process_name)) is not None:
            trace.set_tracer_provider(made)
            provider = made
    return OpenTelemetryTracer(provider)


def _provider(process_name: str) -> Provider | None:
    """A provider with the exporters that the environment names; None if it names none."""
    names = [name.strip() for name in os.environ.get(EXPORTER_VARIABLE, "").split(",")]
    exporters = [exporter for name in names if name not in ("", "none") for exporter in _exporters(name)]
    if not exporters:
        return None
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "skipper"}
    provider = TracerProvider(resource=Resource.create({**named, "service.instance.id": process_name}))
    for exporter in exporters:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _exporters(name: str) -> list[Any]:
    found = [entry.load()() for entry in entry_points(group=_EXPORTERS, name=name)]
    if not found:
        _log.warning("%s names %r, which no installed package provides", EXPORTER_VARIABLE, name)
    return found


class OpenTelemetryTracer:
    """See `control.runtime.tracing.Tracer`."""

    def __init__(self, provider: Provider) -> None:
        self._provider = provider
        self._tracer = trace.get_tracer("skipper", tracer_provider=provider)

    def sending(self, call: TracedCall) -> _Sending:
        """A call by the running code."""
        attributes = _attributes(call.mesh, call.endpoint, {"skipper.mesh.size": call.size})
        if call.actor is not None and call.actor.rank:
            attributes["skipper.rank"] = _rank(call.actor.rank)
        kind = SpanKind.CLIENT if call.is_awaited else SpanKind.PRODUCER
        return _Sending(self._tracer.start_span(f"{call.mesh}.{call.endpoint}", kind=kind, attributes=attributes))

    @contextmanager
    def serving(self, actor: TracedActor, mail: Mail) -> Iterator[None]:
        """A message that an actor handles within the context."""
        call = mail.message
        endpoint = call.method.removesuffix(WRAPPED)
        parent = _propagator.extract({_PARENT: call.trace.decode("ascii", "replace")}, contexts.Context())
        rest: dict[str, Attribute] = {"skipper.actor": actor.actor_id, "skipper.class": actor.class_name}
        if actor.rank:
            rest["skipper.rank"] = _rank(actor.rank)
        with self._tracer.start_as_current_span(
            f"{actor.name}.{endpoint}",
            parent,
            kind=SpanKind.SERVER if call.wants_reply else SpanKind.CONSUMER,
            attributes=_attributes(actor.name, endpoint, rest),
        ):
            yield

    def failed(self, error: BaseException) -> None:
        """Note that the current endpoint has raised."""
        span = trace.get_current_span()
        _record(span, error)
        _fail(span, class_name(error), summarize(error))

    @contextmanager
    def span(self, name: str, attributes: dict[str, Attribute]) -> Iterator[_OpenSpan]:
        """An operation of the running code."""
        with self._tracer.start_as_current_span(name, attributes=attributes) as span:
            yield _OpenSpan(span)

    def flush(self) -> None:
        """Export what was recorded."""
        flush = getattr(self._provider, "force_flush", None)  # a method of the SDK's providers, not of all
        if flush is not None:
            # On a thread of its own, since an exporter without a collector has its own time-outs.
            flushing = threading.Thread(target=flush, name="control-spans", daemon=True)
            flushing.start()
            flushing.join(FLUSH_TIMEOUT_S)


class _OpenSpan:
    """See `control.runtime.tracing.Span`."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def set(self, **attributes: Attribute) -> None:
        """Add attributes."""
        self._span.set_attributes(attributes)


class _Sending:
    """See `control.runtime.tracing.Sending`. Ends when it has been sent, unless it lasts `until` there is a reply."""

    def __init__(self, span: Span) -> None:
        carrier: dict[str, str] = {}
        _propagator.inject(carrier, trace.set_span_in_context(span, contexts.Context()))
        self.traceparent = carrier.get(_PARENT, "").encode()
        self._span = span
        self._is_awaited = False

    def until(self, reply: ReplyHandler) -> _Awaiting:
        """Extend the span until no further reply is expected."""
        self._is_awaited = True
        return _Awaiting(reply, self._span)

    def __enter__(self) -> _Sending:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            _record(self._span, error)
            _fail(self._span, class_name(error), f"it was not sent: {message_of(error)}")
        if error is not None or not self._is_awaited:
            self._span.end()


class _Awaiting:
    """Takes a reply from a port, ends the span, and passes the reply on. The reply is not unpickled here."""

    __slots__ = ("_reply", "_span")

    def __init__(self, reply: ReplyHandler, span: Span) -> None:
        self._reply = reply
        self._span = span

    def deliver(self, rank: int, kind: Kind, payload: Payload) -> bool:
        """Pass on a reply."""
        if kind is Kind.FAILURE:
            _fail(self._span, "ActorError", "the endpoint raised, or was not reached: see its own span")
        return self._end_if(self._reply.deliver(rank, kind, payload))

    def process_lost(self, process_id: str, loss: Loss) -> bool:
        """Pass on that a process is gone."""
        is_over = self._reply.process_lost(process_id, loss)
        if is_over:
            _fail(self._span, "SupervisionError", loss.reason)
        return self._end_if(is_over)

    def entrust(self, rank: int) -> None:
        """Pass that on."""
        self._reply.entrust(rank)

    def lapse(self, rank: int, error: LinkError) -> bool:
        """Pass on that nobody will reply."""
        _fail(self._span, type(error).__name__, str(error))
        return self._end_if(self._reply.lapse(rank, error))

    def _end_if(self, is_over: bool) -> bool:
        if is_over:
            self._span.end()
        return is_over


def _rank(rank: Point) -> str:
    """Coordinates as text, such as ``hosts=0, gpus=3``."""
    return ", ".join(f"{axis}={index}" for axis, index in dict(rank).items())


def _attributes(mesh: str, endpoint: str, rest: Mapping[str, Attribute]) -> dict[str, Attribute]:
    return {"rpc.system": "skipper", "rpc.service": mesh, "rpc.method": endpoint, **rest}


def _record(span: Span, error: BaseException) -> None:
    """What `Span.record_exception` does, for exceptions of any origin: methods may raise, texts may be long."""
    what = {"type": class_name(error), "message": message_of(error), "stacktrace": describe(error)}
    span.add_event("exception", {f"exception.{key}": value for key, value in what.items()})


def _fail(span: Span, kind: str, message: str) -> None:
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR, message))
