"""`Envelope`: one message between processes, and `ProcessRef`: where a process is reached."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

from control.shape import Extent

Payload: TypeAlias = tuple[bytes | bytearray | memoryview, ...]
"""A pickle followed by its out-of-band buffers."""

NO_EXTENT = Extent()

STOPPED = "it has stopped"
"""Why a link is lost whose other end said goodbye."""


class Kind(enum.IntEnum):
    """What an envelope is; the numbers are those of `link.proto`."""

    CALL = 1
    REPLY = 2
    ERROR = 3
    AGENT = 4
    PING = 5
    BYE = 6


@dataclass(frozen=True, slots=True)
class ProcessRef:
    """A process of the job, as others refer to it.

    Attributes:
        id: unique for ever, so that a restarted process is another one; begins with the id of the job and a dash.
        address: a gRPC target: ``unix-abstract:NAME`` within a host, ``HOST:PORT`` between hosts.
        name: for people.
        launcher: the process that launched it and knows whether it lives; None for the script.
    """

    id: str
    address: str
    name: str
    launcher: ProcessRef | None = None

    @property
    def job(self) -> str:
        """The id of the job."""
        return self.id.partition("-")[0]

    def __str__(self) -> str:
        return self.name


@dataclass(slots=True)
class Envelope:
    """One message; see `link.proto` for the meaning of each field."""

    kind: Kind
    target: int = 0
    payload: Payload = ()
    method: str = ""
    reply_to: int = 0
    rank: int = 0
    extent: Extent = NO_EXTENT
