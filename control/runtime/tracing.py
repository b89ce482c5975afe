"""The places at which the runtime tells a tracer what happens. Without `enable_tracing` there is no tracer.

The runtime asks one variable, `tracer`, before each call and each message; what is behind it is
`control.observe.telemetry`, which alone knows OpenTelemetry.
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
"""Environment variable: ``1`` where spans are to be made, from the first use on; spawned processes inherit it."""

Attribute = str | bool | int | float


@dataclass(frozen=True, slots=True)
class TracedCall:
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

    def until(self, reply: ReplyHandler) -> ReplyHandler:
        """Have the span last until nothing more is expected there; returns what is to stand behind the port instead."""


class Span(Protocol):
    """A span within which something is done."""

    def set(self, **attributes: Attribute) -> None:
        """Say more of it."""


class TracedActor(Protocol):
    """An actor whose messages are traced."""

    @property
    def name(self) -> str:
        """Of its mesh."""

    @property
    def actor_id(self) -> str:
        """Unique in the job."""

    @property
    def rank(self) -> Point:
        """Its position in its mesh."""

    @property
    def class_name(self) -> str:
        """Of the actor."""


class Tracer(Protocol):
    """Who records spans."""

    def sending(self, call: TracedCall) -> Sending:
        """A call of the code that runs now."""

    def serving(self, actor: TracedActor, mail: Mail) -> AbstractContextManager[object]:
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
    """Have a tracer record what happens in this process from now on."""
    global tracer
    tracer = new


def is_asked_for() -> bool:
    """Whether the environment says that spans are to be recorded."""
    return os.environ.get(VARIABLE, "") not in ("", "0")


def environment() -> dict[str, str]:
    """The variables by which a process that is spawned records spans as this one does: none where this one does not."""
    if tracer is None:
        return {}
    return {VARIABLE: "1", **{name: value for name, value in os.environ.items() if name.startswith("OTEL_")}}


def flush() -> None:
    """Have what was recorded exported; waits for a short while at most."""
    if tracer is not None:
        tracer.flush()
