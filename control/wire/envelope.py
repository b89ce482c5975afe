"""`Envelope`: one message between processes, and `ProcessRef`: where a process is reached."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from skipper.control.model.shape import Extent

if TYPE_CHECKING:
    from skipper.control.wire.bulk import Incoming, Outgoing

Payload: TypeAlias = "tuple[bytes | bytearray | memoryview | Outgoing | Incoming, ...]"
"""A pickle followed by its out-of-band buffers; large ones are lent."""

NO_EXTENT = Extent()


class Whole(bytes):
    """A segment that is to be a ``bytes`` object where it arrives, too."""


STOPPED = "it has stopped"
"""Why a link is lost whose other end said goodbye."""

NOTICE = 1 << 62
"""Numbers from here on in `Envelope.reply_to` are not waited at: they are told if the message cannot be delivered."""

NO_SIGN_OF_LIFE = "no sign of life"
"""Part of the reason why a link is lost whose other end has been silent for too long."""

BEATS = 8
"""How many signs of life are sent in the time for which a process may be silent."""

JUDGED = 0.9
"""The part of that time after which silence is judged: the rest is for the news to reach those who wait."""


class Kind(enum.IntEnum):
    """What an envelope is; the numbers are those of `link.proto`."""

    CALL = 1
    REPLY = 2
    ERROR = 3
    AGENT = 4
    PING = 5
    BYE = 6
    CREDIT = 7
    GIVE_BACK = 8
    CAST = 9
    GATHER = 10
    TREE = 11
    VALUE = 12


@dataclass(frozen=True, slots=True)
class ProcessRef:
    """A process of the job, as others refer to it.

    Attributes:
        id: unique for ever, so that a restarted process is another one; begins with the id of the job and a dash.
        address: ``unix-abstract:NAME`` where only its host reaches it, else ``IP:PORT`` (see `addresses`).
        name: for people.
        launcher: the process that launched it and knows whether it lives; None for the script.
    """

    id: str
    address: str = field(compare=False)
    name: str = field(compare=False)
    launcher: ProcessRef | None = field(default=None, compare=False)

    @property
    def job(self) -> str:
        """The id of the job."""
        return self.id.partition("-")[0]

    def __str__(self) -> str:
        return self.name


@dataclass(slots=True)
class Envelope:
    """One message; see `link.proto` for the meaning of each field.

    Attributes:
        sequence: its place in all that the sender has for the receiving process (see `runtime.cast.order`); 0: none.
    """

    kind: Kind
    target: int = 0
    payload: Payload = ()
    method: str = ""
    reply_to: int = 0
    rank: int = 0
    extent: Extent = NO_EXTENT
    trace: bytes = b""
    sequence: int = 0

    def for_rank(self, rank: int) -> Envelope:
        """The same for a receiver of that rank."""
        return Envelope(self.kind, self.target, self.payload, self.method, self.reply_to, rank, self.extent, self.trace)

    @property
    def wants_reply(self) -> bool:
        """Whether somebody waits for what the endpoint returns or raises."""
        return 0 < self.reply_to < NOTICE
