"""Spans that processes write into a file each, as the tests of tracing read them, and actors that make some."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter, SpanExportResult

from skipper.control import Actor, ActorMesh, Port, concurrent_endpoint, endpoint


@dataclass(frozen=True)
class Made:
    """A span that some process has exported."""

    pid: int
    name: str
    kind: str
    id: str
    parent: str | None
    trace: str
    status: str
    attributes: dict[str, Any]
    events: list[str]


class FileExporter(SpanExporter):
    """Appends spans to a file of this process, a line of JSON each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with open(self._folder / f"{os.getpid()}.jsonl", "a") as file:
            for span in spans:
                made = (
                    *(os.getpid(), span.name, span.kind.name, hex(span.context.span_id)),
                    *(span.parent and hex(span.parent.span_id), hex(span.context.trace_id)),
                    *(span.status.status_code.name, dict(span.attributes), [event.name for event in span.events]),
                )
                file.write(json.dumps(made) + "\n")
        return SpanExportResult.SUCCESS


def provider(folder: Path, *, is_batched: bool = False) -> TracerProvider:
    processor = BatchSpanProcessor if is_batched else SimpleSpanProcessor
    made = TracerProvider()
    made.add_span_processor(processor(FileExporter(folder)))
    return made


def bootstrap(folder: Path, *, is_batched: bool = False) -> Callable[[], None]:
    """For ``spawn_procs``: the process' global provider writes into the folder."""

    def set_provider() -> None:
        trace.set_tracer_provider(provider(folder, is_batched=is_batched))

    return set_provider


def read(folder: Path) -> list[Made]:
    """The spans that all processes have exported so far."""
    lines = [line for file in folder.glob("*.jsonl") for line in file.read_text().splitlines(keepends=True)]
    return [Made(*json.loads(line)) for line in lines if line.endswith("\n")]


class WordlessError(Exception):
    """One that cannot be recorded as others are."""

    def __str__(self) -> str:
        raise SystemExit(3)


class Link(Actor):
    """One of a chain."""

    def __init__(self, below: ActorMesh[Link] | None = None) -> None:
        self._below = below

    @endpoint
    def descend(self, value: int) -> int:
        if self._below is None:
            return value
        with trace.get_tracer("user").start_as_current_span(f"thinking {value}"):
            return int(self._below.descend.call_one(value + 1).get())

    @endpoint
    def fail(self) -> None:
        if self._below is None:
            raise ValueError("no")
        self._below.fail.call_one().get()

    @endpoint
    def fail_badly(self) -> None:
        raise WordlessError

    @endpoint
    def die(self) -> None:
        os._exit(3)

    @endpoint(explicit_response_port=True)
    def answer(self, port: Port[int]) -> None:
        port.send(1)

    @endpoint(explicit_response_port=True)
    def entrust(self, port: Port[int]) -> None:
        """Have the next one answer, and be gone before it does."""
        assert self._below is not None
        self._below.keep.call_one(port).get()
        os._exit(3)

    @endpoint
    def keep(self, port: Port[int]) -> None:
        self._kept = port

    @endpoint
    def give(self) -> None:
        self._kept.send(7)

    @endpoint
    def note(self) -> None:
        """For broadcasts."""

    @endpoint
    def pid(self) -> int:
        return os.getpid()


class AsyncLink(Actor):
    """Handles several messages at a time."""

    def __init__(self, below: ActorMesh[Link]) -> None:
        self._below = below

    @concurrent_endpoint
    async def descend(self, value: int) -> int:
        return int(await self._below.descend.call_one(value))
