"""The messages between two processes: one class for each kind of message. Its fields are also its layout.

The type of a field defines its layout, and `control.wire.codec` reads it. Fields of fixed size come first. The tables
of messages in `docs/wire_protocol.md` are generated from this file: ``Attributes`` describes the fields.

A change that processes of the previous version can skip needs a new minor version (`control.wire.version`). There are
two such changes: new fields behind the others of a class, with a default and `Since`; and a new kind of message. A
process skips unknown kinds from 128 on, and closes the link at any other unknown kind. Every other change needs a new
major version.
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
"""A pickle followed by its out-of-band buffers. Large ones are lent, not sent."""

NO_EXTENT = Extent()

NOTICE = 1 << 62
"""Nobody waits at ports from this number on. Their owner learns if the message cannot be delivered."""

FIRST_OPTIONAL = 128
"""A process skips kinds from this number on if it does not know them."""


class Whole(bytes):
    """A segment that the receiver must also get as a ``bytes`` object."""


class Kind(enum.IntEnum):
    """The kind of a message, as a number."""

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
        words: description for the documentation.
    """

    code: str
    words: str


@dataclass(frozen=True, slots=True)
class Sized:
    """A field that follows its size in bytes.

    Attributes:
        code: that of the size, as in `struct`.
        words: description for the documentation.
        encode: returns the bytes of a value.
        decode: the inverse; may raise ValueError, TypeError or struct.error.
    """

    code: str
    words: str
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


@dataclass(frozen=True, slots=True)
class Since:
    """The minor version that added a field."""

    minor: int


_AXIS = struct.Struct("<IH")

# The same names of endpoints and shapes of meshes come again and again.


@lru_cache(maxsize=4096)
def _encode_text(text: str) -> bytes:
    return text.encode()


@lru_cache(maxsize=4096)
def _decode_text(encoded: bytes) -> str:
    return encoded.decode()


def encode_shape(extent: Extent) -> bytes:
    """The bytes of an extent in a message."""
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
        ValueError, struct.error: the bytes are not an extent.
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
        "H",
        "for each axis: its size (32 bits), the size of its name in bytes (16 bits), its name",
        encode_shape,
        decode_shape,
    ),
]

Move: TypeAlias = tuple[int, int, int]
"""First position, end position (exclusive), and how many messages got numbers since the last cast of the route."""
Moves = Annotated[
    tuple[Move, ...], _rows("<IIQ", "rows of 32, 32 and 64 bits: first position, end position (exclusive), count")
]
Entry: TypeAlias = tuple[int, int, int]
"""An answer: the rank that sends it, its kind, and its number of segments."""
Entries = Annotated[tuple[Entry, ...], _rows("<IBI", "rows of 32, 8 and 32 bits: rank, kind, number of segments")]


# The messages


@dataclass(slots=True, kw_only=True)
class Message:
    """What every message may have in addition to its fields.

    Attributes:
        payload: the segments.
        trace: the ``traceparent`` of the call, as in W3C Trace Context.
        sequence: number of the message among all messages of the sender to the receiving process (see
            `runtime.cast.order`); 0 if it has none.
    """

    kind: ClassVar[Kind]

    payload: Payload = ()
    trace: bytes = b""
    sequence: int = 0


@dataclass(slots=True)
class Call(Message):
    """Calls an endpoint of an actor. The payload is a pickle of the arguments, ``(args, kwargs)``.

    Attributes:
        target: number of the mesh of the actor.
        reply_to: port of the sender that waits for the answer; 0 if none does.
        rank: rank of the actor in the mesh that was called.
        method: name of the endpoint.
        extent: extent of the mesh that was called; empty if that was a single actor.
    """

    kind = Kind.CALL

    target: U64
    reply_to: U64 = 0
    rank: U32 = 0
    method: Text = ""
    extent: Shape = NO_EXTENT

    def for_rank(self, rank: int) -> Call:
        """The same call for the actor with that rank."""
        return Call(self.target, self.reply_to, rank, self.method, self.extent, payload=self.payload, trace=self.trace)

    @property
    def wants_reply(self) -> bool:
        """Whether the sender waits for what the endpoint returns or raises."""
        return 0 < self.reply_to < NOTICE


def is_noticed(message: Message) -> TypeGuard[Call]:
    """Whether nobody waits for an answer, but the sender learns if the message cannot be delivered."""
    return isinstance(message, Call) and message.reply_to >= NOTICE


@dataclass(slots=True)
class ProcessRequest(Message):
    """A request to the process itself, such as to start an actor. The payload is a pickle of the argument.

    Attributes:
        target: number of the mesh or port that the request is about; 0 if there is none.
        reply_to: port of the sender that waits for the answer; 0 if none does.
        rank: rank of the receiver among the processes that get the request; for a port, the rank at that port.
        method: name of the request.
    """

    kind = Kind.REQUEST

    target: U64
    reply_to: U64 = 0
    rank: U32 = 0
    method: Text = ""

    @property
    def wants_reply(self) -> bool:
        """Whether the sender waits for an answer."""
        return self.reply_to != 0


@dataclass(slots=True)
class Answer(Message):
    """A message to a port.

    Attributes:
        port: number of the port.
        rank: rank of the sender of the answer in the mesh that was called.
    """

    port: U64
    rank: U32 = 0


@dataclass(slots=True)
class Reply(Answer):
    """The answer to a call or a request. The payload is a pickle of the value.

    Attributes:
        port: port that waits for the answer.
        rank: rank of the sender of the answer in the mesh that was called.
    """

    kind = Kind.REPLY


@dataclass(slots=True)
class Failure(Answer):
    """A call or a request has failed. The payload is a pickle of the description of an exception.

    Attributes:
        port: port that waits for the answer.
        rank: rank of the sender of the answer in the mesh that was called.
    """

    kind = Kind.FAILURE


@dataclass(slots=True)
class PortValue(Answer):
    """A value that was sent to a port of a channel. The payload is a pickle of the value.

    Attributes:
        port: number of the port.
        rank: distinguishes senders that share the port.
    """

    kind = Kind.VALUE


@dataclass(slots=True)
class Ping(Message):
    """A heartbeat, eight times in `heartbeat_s`; for an agent, eight times in `unresponsive_s`.

    If the sender becomes silent, processes of the same host use these fields to check whether it still exists.

    Attributes:
        pid: process id of the sender; 0 if it is not given.
        namespace: inode of the pid namespace of that process id.
    """

    kind = Kind.PING

    pid: U64 = 0
    namespace: U64 = 0


@dataclass(slots=True)
class Bye(Message):
    """The last message of a process that exits normally."""

    kind = Kind.BYE


@dataclass(slots=True)
class Credit(Message):
    """An actor has handled messages from the receiving process.

    Attributes:
        target: number of the mesh of the actor.
        messages: number of messages.
        nbytes: size of these messages in bytes.
    """

    kind = Kind.CREDIT

    target: U64
    messages: U32
    nbytes: U64


@dataclass(slots=True)
class LoanReturned(Message):
    """The sender no longer needs a segment that the receiving process has lent.

    Attributes:
        loan: number of the loan.
        is_readable: whether the sender was able to read the memory of the receiving process.
    """

    kind = Kind.LOAN_RETURNED

    loan: U64
    is_readable: Flag


# Trees


@dataclass(slots=True)
class Cast(Message):
    """A call for an actor and for the actors below it in a tree.

    Attributes:
        route: number of the tree.
        number: number of the cast in this tree; casts count from 1 without a gap.
        settled: nobody waits for answers to casts up to this number.
        target: as in `Call`.
        reply_to: as in `Call`.
        method: as in `Call`.
        extent: as in `Call`.
        moves: how many other messages got numbers between the previous cast of the tree and this one, for the ranks
            that got some.
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
        """The call for the actor with that rank."""
        return Call(self.target, self.reply_to, rank, self.method, self.extent, payload=self.payload, trace=self.trace)


@dataclass(slots=True)
class CastAnswers(Message):
    """Answers to a cast from a part of its tree. The payload has the segments of one answer after the other.

    Attributes:
        route: number of the tree.
        number: number of the cast.
        port: port that waits for the answers, in the process that sent the cast.
        is_home: whether the receiver is the process that sent the cast.
        entries: one row for each answer.
    """

    kind = Kind.ANSWERS

    route: U64
    number: U64
    port: U64
    is_home: Flag
    entries: Entries


@dataclass(slots=True)
class RouteOpened(Message):
    """The receiver becomes a node of a tree. The payload is JSON: which node, and which nodes are below it."""

    kind = Kind.ROUTE_OPENED


@dataclass(slots=True)
class RouteBegun(Message):
    """From now on every message of the sender to the receiver has a number."""

    kind = Kind.ROUTE_BEGUN


@dataclass(slots=True)
class RouteDone(Message):
    """Goes up the tree: the sender and all nodes below it have handled all casts up to this one.

    Attributes:
        route: number of the tree.
        number: number of the cast.
    """

    kind = Kind.ROUTE_DONE

    route: U64
    number: U64


@dataclass(slots=True)
class RouteSettled(Message):
    """Goes down the tree: nobody waits for answers to casts up to this one.

    Attributes:
        route: number of the tree.
        number: number of the cast.
    """

    kind = Kind.ROUTE_SETTLED

    route: U64
    number: U64


@dataclass(slots=True)
class RouteCut(Message):
    """The receiver must stop forwarding to a node below it.

    To the process that casts: the sender has lost a node below it, and asks for another way to that.

    Attributes:
        route: number of the tree.
        process: id of the process of that node.
    """

    kind = Kind.ROUTE_CUT

    route: U64
    process: Text


@dataclass(slots=True)
class RouteLost(Message):
    """The sender has lost the node above it, and asks the root of the tree for another route.

    Attributes:
        route: number of the tree.
    """

    kind = Kind.ROUTE_LOST

    route: U64


@dataclass(slots=True)
class RouteClosed(Message):
    """No more casts will come down this tree.

    Attributes:
        route: number of the tree.
        number: number of the last cast.
    """

    kind = Kind.ROUTE_CLOSED

    route: U64
    number: U64


@dataclass(slots=True)
class Filler(Message):
    """Has a number and no content. It supplies the number for the message before it, which was sent without one."""

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
"""The messages between nodes of trees."""

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
"""All messages, in the order of their kinds."""
