"""Spans of puts and gets."""

from collections.abc import Iterator

import pytest
import torch
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from skipper import torchstore as ts
from skipper.control.observe.tracing import install
from skipper.control.runtime import current_runtime, tracing
from skipper.torchstore.errors import KeyNotFoundError
from tests.control.conftest import wait_until


@pytest.fixture
def exporter(store: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Has the spans of this process; the others make none."""
    monkeypatch.setattr(tracing, "tracer", None)
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    install(current_runtime.current(), provider)
    yield exporter
    provider.shutdown()


def the(exporter: InMemorySpanExporter, name: str) -> ReadableSpan:
    (span,) = [span for span in exporter.get_finished_spans() if span.name == name]
    return span


async def test_a_put_and_a_get_are_spans_with_what_they_move_below_them(exporter: InMemorySpanExporter) -> None:
    await ts.put_state_dict({"a": torch.ones(1000)}, "policy")
    check(exporter, "torchstore.put")
    exporter.clear()
    await ts.get_state_dict("policy", user_state_dict={"a": torch.zeros(1000)})
    check(exporter, "torchstore.get")


def check(exporter: InMemorySpanExporter, name: str) -> None:
    span, transfer = the(exporter, name), the(exporter, "dataplane.transfer")
    said = span.attributes or {}
    assert (said["torchstore.key"], said["torchstore.version"], said["torchstore.mode"]) == ("policy", 1, "snapshot")
    assert said["torchstore.nbytes"] >= 4000
    assert transfer.parent is not None
    assert transfer.parent.span_id == span.context.span_id
    wait_until(lambda: span.context.span_id in parents_of_calls(exporter), "the spans of calls have ended, too")


def parents_of_calls(exporter: InMemorySpanExporter) -> set[int]:
    calls = [span for span in exporter.get_finished_spans() if "rpc.system" in (span.attributes or {})]
    return {call.parent.span_id for call in calls if call.parent is not None}


async def test_a_get_that_fails_is_an_error(exporter: InMemorySpanExporter) -> None:
    with pytest.raises(KeyNotFoundError):
        await ts.get("nothing")
    span = the(exporter, "torchstore.get")
    assert span.status.status_code.name == "ERROR"
    assert [event.name for event in span.events] == ["exception"]
