"""The places at which the runtime tells a tracer what happens. Without `enable_tracing` there is no tracer.

The runtime checks one variable, `tracer`, before each call and each message. It is set by `control.observe.telemetry`,
the only module that knows OpenTelemetry.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from skipper.control.model.shape import Point

if TYPE_CHECKING:
    from skipper.control.runtime.interfaces import ReplyHandler
    from skipper.control.runtime.messages import ActorRef, Mail

VARIABLE = "SKIPPER_TRACING"
"""Environment variable: ``1`` to make spans from the first use on; spawned processes inherit it."""

Attribute = str | bool | int | float


@dataclass(frozen=True, slots=True)
class TracedCall:
    """A call that is about to be sent.

    Attributes:
        mesh: name of the actors.
        endpoint: which of their endpoints.
        is_awaited: whether the caller waits for what the endpoint returns.
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
    """The header that travels with the call, in the format of the W3C's Trace Context."""

    def __enter__(self) -> Sending:
        """Begin to send."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Note that it has been sent, or could not be."""

    def until(self, reply: ReplyHandler) -> ReplyHandler:
        """Keep the span open until nothing more is expected; returns the handler to put behind the port instead."""


class Span(Protocol):
    """A span of some work."""

    def set(self, **attributes: Attribute) -> None:
        """Add attributes."""


class TracedActor(Protocol):
    """An actor whose messages are traced."""

    @property
    def name(self) -> str:
        """The name of its mesh."""

    @property
    def actor_id(self) -> str:
        """Unique in the job."""

    @property
    def rank(self) -> Point:
        """Its position in its mesh."""

    @property
    def class_name(self) -> str:
        """The name of the actor's class."""


class Tracer(Protocol):
    """Records spans."""

    def sending(self, call: TracedCall) -> Sending:
        """The span of a call by the code that runs now."""

    def serving(self, actor: TracedActor, mail: Mail) -> AbstractContextManager[object]:
        """The span of a message that an actor handles within it."""

    def failed(self, error: BaseException) -> None:
        """Note that the endpoint that is served now has raised."""

    def span(self, name: str, attributes: dict[str, Attribute]) -> AbstractContextManager[Span]:
        """The span of something that the running code does."""

    def flush(self) -> None:
        """Export what was recorded; waits for a short while at most."""


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
        """Nothing is recorded."""


_NO_SPAN = _NoSpan()


def span(name: str, **attributes: Attribute) -> AbstractContextManager[Span]:
    """A span of something that this process does, for code outside of endpoints; nothing if tracing is off.

    It is a child of the span of the running endpoint, or of the current span, and spans made within are its children.

    Args:
        name: name of the span, such as ``torchstore.put``.
        **attributes: its attributes; ``set`` of the object that the context manager yields adds more.
    """
    return _NO_SPAN if tracer is None else tracer.span(name, attributes)


def trace_by(new: Tracer) -> None:
    """Set the tracer that records what happens in this process from now on."""
    global tracer
    tracer = new


def is_asked_for() -> bool:
    """Whether the environment says that spans are to be recorded."""
    return os.environ.get(VARIABLE, "") not in ("", "0")


def environment() -> dict[str, str]:
    """The variables that make a spawned process record spans like this one; empty if this one records none."""
    if tracer is None:
        return {}
    return {VARIABLE: "1", **{name: value for name, value in os.environ.items() if name.startswith("OTEL_")}}


def flush() -> None:
    """Export what was recorded; waits for a short while at most."""
    if tracer is not None:
        tracer.flush()
