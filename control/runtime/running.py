"""The runtime of this process as modules see it that it is built on: ports, contexts and inquiries.

`control.runtime.current_runtime` starts and ends it, and all others ask that module.
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
    """The script as an actor, where this process is the script's."""

    @property
    def instance(self) -> BaseActorInstance:
        """It, as it sees itself."""

    def take(self, failure: MeshFailure) -> None:
        """Do what is done by default about a failure that nobody below has handled."""


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
        """The script; None in a process that belongs to somebody."""

    def send(self, to: ProcessRef, message: Message) -> None:
        """Send a message."""

    def send_to_port(self, address: ReplyAddress, kind: Kind, payload: Payload, *, is_answer: bool) -> None:
        """Send to a port of any process, as an answer or for its own sake."""


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
    """Note which runtime this process has from now on; None: none."""
    global _current
    _current = process


def start_by(start: Callable[[], RunningProcess]) -> None:
    """Have a function start the runtime with its first use."""
    global _start
    _start = start
