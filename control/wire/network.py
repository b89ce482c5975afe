"""`Network`: how a transport listens and dials. `sockets` has the network of a real process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from skipper.control.wire.certificates import Certificates
from skipper.control.wire.handshake import Guest
from skipper.control.wire.message_stream import DialingStream, Metadata, User
from skipper.control.wire.process_ref import ProcessRef

Connect: TypeAlias = Callable[[Metadata, User], DialingStream]
"""Makes the stream of a dial; OSError if no process listens."""

OnProven: TypeAlias = Callable[[Guest, ProcessRef], None]
"""Takes a stream and the process at its other end, once that has proven itself; on the stream's thread."""


class Network(Protocol):
    """The network of one process.

    A transport decides about links; everything that waits, listens or connects is done here. So a transport also runs
    on a simulated network, as in `tests/simulation`.

    Attributes:
        pid: this process' id on this host; 0: it shares one with others.
    """

    pid: int

    def listen(self, me: ProcessRef, certificates: Certificates | None, on_proven: OnProven) -> ProcessRef:
        """Listen within the host and, if the address of ``me`` says so, beyond it; returns ``me`` with the port.

        Raises:
            WireError: the address cannot be listened on.
        """

    def listen_beyond(self, me: ProcessRef, host: str, certificates: Certificates | None) -> ProcessRef:
        """Listen beyond the host, too, at an IP of it; from any thread, and once. Returns as `listen` does.

        Raises:
            WireError: the address cannot be listened on.
        """

    def within(self, process_id: str) -> Connect:
        """A function that dials a process of this host; PermissionError if only `beyond` reaches it."""

    def beyond(self, address: str | None) -> Connect | None:
        """A function that dials an ``IP:PORT``, or with None a process of this host; None: the dial uses gRPC."""

    def is_current(self) -> bool:
        """Whether the current thread delivers messages."""

    def fall_silent(self) -> None:
        """Close every socket: this is a forked copy of the process."""

    async def close(self, patience_s: float) -> None:
        """Accept no more, and end what is left; streams that do not end are cut after ``patience_s``."""
