"""`Network`: where a transport listens, and by what it dials. `sockets` is the one of a real process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from skipper.control.wire.certificates import Certificates
from skipper.control.wire.handshake import Guest
from skipper.control.wire.message_stream import DialingStream, Metadata, User
from skipper.control.wire.process_ref import ProcessRef

Connect: TypeAlias = Callable[[Metadata, User], DialingStream]
"""Makes the stream of a dial; OSError where nobody listens."""

OnProven: TypeAlias = Callable[[Guest, ProcessRef], None]
"""Takes the stream and the process at its other end, once that has proven itself; on the stream's thread."""


class Network(Protocol):
    """The network as one process has it.

    A transport decides what becomes of links; whatever waits, listens or connects is done here. So a transport also
    runs on a network that is none, as in `tests/simulation`.

    Attributes:
        pid: where this host's table of processes has this one; 0: nowhere, it shares its place with others.
    """

    pid: int

    def listen(self, me: ProcessRef, certificates: Certificates | None, on_proven: OnProven) -> ProcessRef:
        """Listen within the host and, where the address of ``me`` says so, beyond it; returns ``me`` with the port.

        Raises:
            WireError: the address cannot be listened on.
        """

    def listen_beyond(self, me: ProcessRef, host: str, certificates: Certificates | None) -> ProcessRef:
        """Listen beyond the host, too, at an IP of it; from any thread, and once. Returns as `listen` does.

        Raises:
            WireError: the address cannot be listened on.
        """

    def within(self, process_id: str) -> Connect:
        """What dials a process of this host; PermissionError where only `beyond` reaches it."""

    def beyond(self, address: str | None) -> Connect | None:
        """What dials an ``IP:PORT``, or with None a process of this host; None: gRPC, which the dial knows."""

    def is_current(self) -> bool:
        """Whether the current thread is one of those that deliver."""

    def fall_silent(self) -> None:
        """Let go of every socket: this is a forked copy of the process."""

    async def close(self, patience_s: float) -> None:
        """Let nobody in any more, and end what is left; streams that do not end are cut after ``patience_s``."""
