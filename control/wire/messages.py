"""What two processes say to each other: one class for each kind of message, whose fields are its layout, too.

A field's type says how it is laid out, and `control.wire.codec` reads that; those of fixed size come first. The tables
of `docs/wire_protocol.md` are made from this file: what is to be known of a field stands under ``Attributes``.

To change the protocol so that those who do not know of it can still talk with those who do (a minor version more, see
`control.wire.version`): add fields behind those of a class, with a default and `Since`; or add a kind of message. Those
from 128 on are skipped by who does not know them, any other one ends the link. All else is a major version.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias, TypeGuard

from skipper.control.model.shape import Extent

if TYPE_CHECKING:
    from skipper.control.wire.bulk import Incoming, Outgoing

Payload: TypeAlias = "tuple[bytes | bytearray | memoryview | Outgoing | Incoming, ...]"
"""A pickle followed by its out-of-band buffers; large ones are lent."""

NO_EXTENT = Extent()

NOTICE = 1 << 62
"""Ports from this number on are not waited at: who is behind them is told if the message cannot be delivered."""

FIRST_OPTIONAL = 128
"""Kinds from here on are skipped by who does not know them."""


class Whole(bytes):
    """A segment that is to be a ``bytes`` object where it arrives, too."""


class Kind(enum.IntEnum):
    """What a message is, as a number."""

    CALL = 1
    REPLY = 2
    FAILURE = 3
    REQUEST = 4
    PING = 5
    BYE = 6
    CREDIT = 7
    LOAN_RETURNED = 8
    CAST = 9
    ANSWERS = 10
    VALUE = 11
    ROUTE_OPENED = 12
    ROUTE_BEGUN = 13
    ROUTE_DONE = 14
    ROUTE_SETTLED = 15
    ROUTE_CUT = 16
    ROUTE_LOST = 17
    ROUTE_CLOSED = 18
    FILLER = 19


# How fields are laid out


@dataclass(frozen=True, slots=True)
class Fixed:
    """A field of fixed size.

    Attributes:
        code: as in `struct`.
        words: what it is, for people.
    """

    code: str
    words: str


@dataclass(frozen=True, slots=True)
class Sized:
    """A field whose size in bytes stands before it.

    Attributes:
        code: of the size, as in `struct`.
        words: what it is, for people.
        encode: its bytes.
        decode: the inverse; may raise ValueError, TypeError or struct.error.
    """

    code: str
    words: str
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


@dataclass(frozen=True, slots=True)
class Since:
    """The minor version with which a field came."""

    minor: int


_AXIS = struct.Struct("<IH")

# The same is said again and again: names of endpoints, shapes of meshes.


@lru_cache(maxsize=4096)
def _encode_text(text: str) -> bytes:
    return text.encode()


@lru_cache(maxsize=4096)
def _decode_text(encoded: bytes) -> str:
    return encoded.decode()


def encode_shape(extent: Extent) -> bytes:
    """An extent as a message has it."""
    return b"" if extent is NO_EXTENT else _encode_axes(extent.axes, extent.sizes)


@lru_cache(maxsize=1024)
def _encode_axes(axes: tuple[str, ...], sizes: tuple[int, ...]) -> bytes:
    parts: list[bytes] = []
    for axis, size in zip(axes, sizes, strict=True):
        name = axis.encode()
        parts += (_AXIS.pack(size, len(name)), name)
    return b"".join(parts)


@lru_cache(maxsize=1024)
def _decode_extent(encoded: bytes) -> Extent:
    axes, sizes, position = [], [], 0
    while position < len(encoded):
        size, nbytes = _AXIS.unpack_from(encoded, position)
        begin, position = position + _AXIS.size, position + _AXIS.size + nbytes
        axes.append(encoded[begin:position].decode())
        sizes.append(size)
    if position != len(encoded):
        raise ValueError("an extent of the wrong size")
    return Extent(tuple(axes), tuple(sizes))


def decode_shape(encoded: bytes) -> Extent:
    """The inverse of `encode_shape`.

    Raises:
        ValueError, struct.error: these bytes are no extent.
    """
    return _decode_extent(encoded) if encoded else NO_EXTENT


def _rows(layout: str, words: str) -> Sized:
    row = struct.Struct(layout)

    def encode(rows: tuple[tuple[int, ...], ...]) -> bytes:
        return b"".join(row.pack(*values) for values in rows)

    def decode(encoded: bytes) -> tuple[tuple[int, ...], ...]:
        return tuple(row.iter_unpack(encoded))

    return Sized("I", words, encode, decode)


U32 = Annotated[int, Fixed("I", "32 bits")]
U64 = Annotated[int, Fixed("Q", "64 bits")]
Flag = Annotated[bool, Fixed("?", "8 bits, 0 or 1")]
Text = Annotated[str, Sized("H", "UTF-8", _encode_text, _decode_text)]
Shape = Annotated[
    Extent,
    Sized(
        "H", "each axis: its size, 32 bits; that of its name in bytes, 16 bits; its name", encode_shape, decode_shape
    ),
]

Move: TypeAlias = tuple[int, int, int]
"""For positions from the one to before the other: how much else was numbered since the last cast of the route."""
Moves = Annotated[tuple[Move, ...], _rows("<IIQ", "rows of 32, 32 and 64 bits: positions from, to before, by how much")]
Entry: TypeAlias = tuple[int, int, int]
"""Of an answer: who gives it, by rank; its kind; of how many segments it is."""
Entries = Annotated[tuple[Entry, ...], _rows("<IBI", "rows of 32, 8 and 32 bits: rank, kind, number of segments")]


# The messages


@dataclass(slots=True, kw_only=True)
class Message:
    """What every message may have beside its fields.

    Attributes:
        payload: its segments.
        trace: the ``traceparent`` of the call that it belongs to, as in the W3C's Trace Context.
        sequence: its place in all that the sender has for the receiving process (see `runtime.cast.order`); 0: none.
    """

    kind: ClassVar[Kind]

    payload: Payload = ()
    trace: bytes = b""
    sequence: int = 0


@dataclass(slots=True)
class Call(Message):
    """For an actor. The payload is a pickle of its arguments, ``(args, kwargs)``.

    Attributes:
        target: the number of the mesh that the actor belongs to.
        reply_to: the port of the sender where the answer is waited for; 0: nowhere.
        rank: the actor's position in what was called.
        method: the endpoint.
        extent: of what was called; empty where that was one actor.
    """

    kind = Kind.CALL

    target: U64
    reply_to: U64 = 0
    rank: U32 = 0
    method: Text = ""
    extent: Shape = NO_EXTENT

    def for_rank(self, rank: int) -> Call:
        """The same for an actor of that rank."""
        return Call(self.target, self.reply_to, rank, self.method, self.extent, payload=self.payload, trace=self.trace)

    @property
    def wants_reply(self) -> bool:
        """Whether somebody waits for what the endpoint returns or raises."""
        return 0 < self.reply_to < NOTICE


def is_noticed(message: Message) -> TypeGuard[Call]:
    """Whether nobody waits for an answer, and somebody is told that it could not be delivered."""
    return isinstance(message, Call) and message.reply_to >= NOTICE


@dataclass(slots=True)
class ProcessRequest(Message):
    """For the process itself: to start an actor, to launch a process, … The payload is a pickle of the argument.

    Attributes:
        target: the number of the mesh or port that it is about; 0: none.
        reply_to: the port of the sender where the answer is waited for; 0: nowhere.
        rank: the receiver's position among those that are asked; of a port, the position that is meant.
        method: what is asked for.
    """

    kind = Kind.REQUEST

    target: U64
    reply_to: U64 = 0
    rank: U32 = 0
    method: Text = ""

    @property
    def wants_reply(self) -> bool:
        """Whether somebody waits for an answer."""
        return self.reply_to != 0


@dataclass(slots=True)
class Answer(Message):
    """For a port.

    Attributes:
        port: its number.
        rank: the position of who answers among those that were asked.
    """

    port: U64
    rank: U32 = 0


@dataclass(slots=True)
class Reply(Answer):
    """The answer to a call or a request. The payload is a pickle of it.

    Attributes:
        port: where it is waited for.
        rank: the position of who answers among those that were asked.
    """

    kind = Kind.REPLY


@dataclass(slots=True)
class Failure(Answer):
    """There will be no answer. The payload says why: a pickle of an exception's description.

    Attributes:
        port: where it is waited for.
        rank: the position of who answers among those that were asked.
    """

    kind = Kind.FAILURE


@dataclass(slots=True)
class PortValue(Answer):
    """For a port whatever else comes there. The payload is a pickle of the value.

    Attributes:
        port: of a channel.
        rank: tells apart those who share a port.
    """

    kind = Kind.VALUE


@dataclass(slots=True)
class Ping(Message):
    """A sign of life, eight times in `heartbeat_s`.

    With what it says others of the same host can look at the sender before they take its silence for its end.

    Attributes:
        pid: of the sender; 0: not said.
        namespace: the inode of the pid namespace that this is meant in.
    """

    kind = Kind.PING

    pid: U64 = 0
    namespace: U64 = 0


@dataclass(slots=True)
class Bye(Message):
    """The last message of a process that ends in good order."""

    kind = Kind.BYE


@dataclass(slots=True)
class Credit(Message):
    """An actor has handled what the receiving process has sent to it.

    Attributes:
        target: the number of the mesh that the actor belongs to.
        messages: so many.
        nbytes: of so many bytes.
    """

    kind = Kind.CREDIT

    target: U64
    messages: U32
    nbytes: U64


@dataclass(slots=True)
class LoanReturned(Message):
    """A segment that the receiving process has lent is not needed any more.

    Attributes:
        loan: its number.
        is_readable: whether the sender has just seen that it can read the receiving process' memory.
    """

    kind = Kind.LOAN_RETURNED

    loan: U64
    is_readable: Flag


# Trees


@dataclass(slots=True)
class Cast(Message):
    """A call for an actor and those below it in a tree.

    Attributes:
        route: the number of the tree.
        number: of the cast on this route; they count from 1 without a gap.
        settled: up to which cast no answer is waited for any more.
        target: as in a call.
        reply_to: as in a call.
        method: as in a call.
        extent: as in a call.
        moves: what was numbered for some of the receivers between the last cast of the route and this one.
    """

    kind = Kind.CAST

    route: U64
    number: U64
    settled: U64
    target: U64
    reply_to: U64 = 0
    method: Text = ""
    extent: Shape = NO_EXTENT
    moves: Moves = ()

    def call_for(self, rank: int) -> Call:
        """What it is for the actor of that rank."""
        return Call(self.target, self.reply_to, rank, self.method, self.extent, payload=self.payload, trace=self.trace)


@dataclass(slots=True)
class CastAnswers(Message):
    """Answers to a cast, from a part of its tree. The payload has their segments, one answer after the other.

    Attributes:
        route: the number of the tree.
        number: of the cast.
        port: where they are waited for, in the process that has cast.
        is_home: whether the receiver is that process.
        entries: whose they are.
    """

    kind = Kind.ANSWERS

    route: U64
    number: U64
    port: U64
    is_home: Flag
    entries: Entries


@dataclass(slots=True)
class RouteOpened(Message):
    """The receiver is a node of a tree. The payload says which, and who is below, in JSON."""

    kind = Kind.ROUTE_OPENED


@dataclass(slots=True)
class RouteBegun(Message):
    """From here on everything that the sender has for the receiver has a number."""

    kind = Kind.ROUTE_BEGUN


@dataclass(slots=True)
class RouteDone(Message):
    """Up the tree: the sender's part of it has handled all casts up to this one.

    Attributes:
        route: the number of the tree.
        number: of the cast.
    """

    kind = Kind.ROUTE_DONE

    route: U64
    number: U64


@dataclass(slots=True)
class RouteSettled(Message):
    """Down the tree: no answer is waited for any more up to this cast.

    Attributes:
        route: the number of the tree.
        number: of the cast.
    """

    kind = Kind.ROUTE_SETTLED

    route: U64
    number: U64


@dataclass(slots=True)
class RouteCut(Message):
    """The receiver passes nothing on any more to a node below it.

    To the process that casts: the sender has lost a node below it, and asks for another way to that.

    Attributes:
        route: the number of the tree.
        process: the id of the node's process.
    """

    kind = Kind.ROUTE_CUT

    route: U64
    process: Text


@dataclass(slots=True)
class RouteLost(Message):
    """The sender has lost the node above it, and asks the process that casts for another way.

    Attributes:
        route: the number of the tree.
    """

    kind = Kind.ROUTE_LOST

    route: U64


@dataclass(slots=True)
class RouteClosed(Message):
    """Nothing more will come down this tree.

    Attributes:
        route: its number.
        number: of its last cast.
    """

    kind = Kind.ROUTE_CLOSED

    route: U64
    number: U64


@dataclass(slots=True)
class Filler(Message):
    """It has a number and says nothing: what was sent just before had to go without one."""

    kind = Kind.FILLER


OfTree: TypeAlias = (
    Cast
    | CastAnswers
    | RouteOpened
    | RouteBegun
    | RouteDone
    | RouteSettled
    | RouteCut
    | RouteLost
    | RouteClosed
    | Filler
)
"""What the nodes of trees say to each other."""

ANSWERS: dict[Kind, type[Answer]] = {message.kind: message for message in (Reply, Failure, PortValue)}

MESSAGES: tuple[type[Message], ...] = (
    Call,
    Reply,
    Failure,
    ProcessRequest,
    Ping,
    Bye,
    Credit,
    LoanReturned,
    Cast,
    CastAnswers,
    PortValue,
    RouteOpened,
    RouteBegun,
    RouteDone,
    RouteSettled,
    RouteCut,
    RouteLost,
    RouteClosed,
    Filler,
)
"""All of them, by their numbers."""
