"""The runtime of this process, for the modules that it is built on: ports, contexts and inquiries.

`control.runtime.current_runtime` starts and ends it; all other modules use that one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from skipper.control.model.failure import MeshFailure
from skipper.control.runtime.interfaces import LocalActor, Ports, Requester
from skipper.control.wire.messages import Kind, Message, Payload
from skipper.control.wire.process_ref import ProcessRef

if TYPE_CHECKING:
    from skipper.control.runtime.context import BaseActorInstance
    from skipper.control.runtime.messages import ReplyAddress
    from skipper.control.wire.transport import Transport


class RunningScript(LocalActor, Protocol):
    """The script as an actor, if this process is the script's."""

    @property
    def instance(self) -> BaseActorInstance:
        """The script's instance, as the script sees itself."""

    def take(self, failure: MeshFailure) -> None:
        """Do the default action for a failure that no actor below has handled."""


class RunningProcess(Requester, Protocol):
    """The runtime of this process."""

    transport: Transport

    @property
    def me(self) -> ProcessRef:
        """This process."""

    @property
    def ports(self) -> Ports:
        """Where answers arrive."""

    @property
    def root_actor(self) -> RunningScript | None:
        """The script; None in a process that has an owner."""

    def send(self, to: ProcessRef, message: Message) -> None:
        """Send a message."""

    def send_to_port(self, address: ReplyAddress, kind: Kind, payload: Payload, *, is_answer: bool) -> None:
        """Send to a port of any process, as an answer or as a value."""


def _no_starter() -> Any:
    raise RuntimeError("skipper.control.runtime.current_runtime has not been imported")


_current: RunningProcess | None = None
_start: Callable[[], RunningProcess] = _no_starter


def current() -> RunningProcess:
    """The runtime of this process; in a script it starts with the first use."""
    return _current or _start()


def is_running() -> bool:
    """Whether this process is part of a job at the moment."""
    return _current is not None


def note(process: RunningProcess | None) -> None:
    """Set the runtime of this process; None: it has none."""
    global _current
    _current = process


def start_by(start: Callable[[], RunningProcess]) -> None:
    """Set the function that starts the runtime at its first use."""
    global _start
    _start = start
