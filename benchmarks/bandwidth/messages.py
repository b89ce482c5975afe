"""The messages between client and server: frozen dataclasses, and their conversion to JSON and back.

The client asks, and the server answers each request but `Alive`. Reading is strict: unknown requests, missing or
surplus keys and wrong types are errors.
"""

from __future__ import annotations

import json
import types
import typing
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeVar

from skipper.benchmarks.bandwidth.channel import MessageChannel
from skipper.benchmarks.errors import PeerError, PeerRefusedError

__all__ = [
    "ATOMICS",
    "WORD",
    "Alive",
    "Connect",
    "Corrupt",
    "Done",
    "Elapsed",
    "Fill",
    "Goodbye",
    "Mismatch",
    "Offer",
    "Request",
    "TransferOrder",
    "IntegrityVerdict",
    "Verify",
    "Where",
    "Which",
    "Wire",
    "Workload",
    "answer",
    "ask",
    "read_answer",
    "read_request",
    "refuse",
    "tell",
]

Where = Literal["exposed", "local"]
"""Which memory of a side: what it exposes to the peer, or what it transfers from and to."""


ATOMICS = ("fetch-add", "compare-and-swap")
"""Operations on one word of `WORD` bytes."""

WORD = 8


@dataclass(frozen=True, slots=True)
class Workload:
    """First request: what both sides prepare for. Answered by `Offer` and ``handles`` handles.

    Attributes:
        op: ``read`` or ``write`` as seen from the client, or one of `ATOMICS`.
        backend: Forced data-plane backend, or ``auto``.
        mem: ``host``, ``cuda`` or ``cuda:N``.
        batch: Buffers that one transfer moves.
        largest: Bytes of the largest buffer of the run; smaller sizes use its beginning.
        bidirectional: The server transfers too, at the same time.
        timeout_s: Deadline of one transfer.
        copy_threads: Threads that copy large blocks, at both ends; 0 leaves it to the data plane.
    """

    op: str
    backend: str
    mem: str
    batch: int
    largest: int
    bidirectional: bool
    timeout_s: float
    copy_threads: int = 0

    @property
    def atomic(self) -> bool:
        """Whether it works on one word and not on runs of bytes."""
        return self.op in ATOMICS

    @property
    def beside_one(self) -> bool:
        """Whether a batch is compared with one transfer of as many bytes, for which there is one more buffer."""
        return self.batch > 1 and not self.bidirectional

    @property
    def handles(self) -> int:
        """Buffers that a side exposes: those of the batch, and the one for the whole batch if there is one."""
        return self.batch + self.beside_one


@dataclass(frozen=True, slots=True)
class Connect:
    """Use the ``handles`` buffers whose descriptors follow, one message each. Answered by `Done`."""

    handles: int


@dataclass(frozen=True, slots=True)
class Fill:
    """Write the pattern of ``seed`` into ``batch`` x ``size`` bytes. Answered by `Done`."""

    where: Where
    size: int
    seed: int


@dataclass(frozen=True, slots=True)
class Verify:
    """Look for the first byte that is not of the pattern. Answered by `IntegrityVerdict`."""

    where: Where
    size: int
    seed: int


@dataclass(frozen=True, slots=True)
class Corrupt:
    """Flip the bits of byte ``at`` of the stream of ``batch`` x ``size`` bytes. Answered by `Done`."""

    where: Where
    size: int
    at: int


@dataclass(frozen=True, slots=True)
class TransferOrder:
    """Transfer ``runs`` times. Answered by `Elapsed`."""

    size: int
    runs: int


@dataclass(frozen=True, slots=True)
class Which:
    """Asks by which link transfers of this backend leave the server. Answered by `Wire`."""

    backend: str


@dataclass(frozen=True, slots=True)
class Alive:
    """The client is busy timing; not answered."""


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The client has finished. Answered by `Done`; then the server drops its buffers."""


Request = Workload | Connect | Fill | Verify | Corrupt | TransferOrder | Which | Alive | Goodbye


@dataclass(frozen=True, slots=True)
class Offer:
    """The server is ready; its handles follow.

    Attributes:
        register_us: What registering the buffers cost, in µs.
        boot_id: Identity of the running kernel, to find out whether both sides share one.
        pid: The server's process there.
        started: When that process began, in clock ticks, so that a reused pid is not mistaken for it.
        addresses: Where its buffers are (the client reads them as the kernel's own
            ``process_vm_readv`` would, as a yardstick); empty for memory that is not the host's.
    """

    register_us: float
    boot_id: str
    pid: int
    started: int
    addresses: list[int]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first wrong byte: its position in the stream of all buffers, and both values."""

    at: int
    expected: int
    found: int


@dataclass(frozen=True, slots=True)
class IntegrityVerdict:
    """Outcome of `Verify`; ``None`` means that every byte is right."""

    mismatch: Mismatch | None


@dataclass(frozen=True, slots=True)
class Elapsed:
    """How long the transfers took together."""

    elapsed_ns: int


@dataclass(frozen=True, slots=True)
class Wire:
    """A link: its rate in Gb/s and its name, or ``None`` and the reason why there is no rate."""

    gbit_per_s: float | None
    told: str


@dataclass(frozen=True, slots=True)
class Done:
    """The request has been carried out."""


Answer = TypeVar("Answer", Offer, IntegrityVerdict, Elapsed, Wire, Done)

_REQUESTS: dict[str, type[Any]] = {kind.__name__.lower(): kind for kind in typing.get_args(Request)}


def tell(channel: MessageChannel, request: Request) -> None:
    """Send a request without waiting for its answer."""
    name = type(request).__name__.lower()
    channel.send(json.dumps({"request": name, **asdict(request)}).encode())


def ask(channel: MessageChannel, request: Request, kind: type[Answer], *, timeout: float | None = None) -> Answer:
    """Send a request and wait for its answer; `read_answer` says what it raises."""
    tell(channel, request)
    return read_answer(channel, kind, timeout=timeout)


def read_answer(channel: MessageChannel, kind: type[Answer], *, timeout: float | None = None) -> Answer:
    """Wait for the answer to a request that was sent.

    Raises:
        PeerRefusedError: The server answered with an error.
        PeerLostError: The connection ended.
        PeerTimeoutError: No answer in time.
        PeerError: The server sent something that is not such an answer.
    """
    document = _parse(channel, channel.receive(timeout=timeout))
    error = document.pop("error", None)
    if isinstance(error, dict):
        raise PeerRefusedError(str(error.get("kind")), str(error.get("message")))
    return typing.cast("Answer", _build(channel, kind, document))


def read_request(channel: MessageChannel, *, timeout: float) -> Request:
    """Wait for the next request.

    Raises:
        PeerLostError: The connection ended.
        PeerTimeoutError: No request in time.
        PeerError: The client sent something that is not a request.
    """
    document = _parse(channel, channel.receive(timeout=timeout))
    name = document.pop("request", None)
    kind = _REQUESTS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise PeerError(f"{channel.peer} asks for something unknown: {name!r}")
    return typing.cast("Request", _build(channel, kind, document))


def answer(channel: MessageChannel, value: Offer | IntegrityVerdict | Elapsed | Wire | Done) -> None:
    """Answer a request."""
    channel.send(json.dumps(asdict(value)).encode())


def refuse(channel: MessageChannel, error: Exception) -> None:
    """Answer a request with an error."""
    channel.send(json.dumps({"error": {"kind": type(error).__name__, "message": str(error)}}).encode())


def _parse(channel: MessageChannel, message: bytes) -> dict[str, Any]:
    try:
        document = json.loads(message)
    except (ValueError, RecursionError) as error:
        raise PeerError(f"{channel.peer} sent something that is not JSON") from error
    if not isinstance(document, dict):
        raise PeerError(f"{channel.peer} sent JSON that is no object")
    return document


def _build(channel: MessageChannel, kind: type[Any], document: dict[str, Any]) -> Any:
    """Make a dataclass of ``document``, whose keys and types must be exactly those of its fields."""
    hints = typing.get_type_hints(kind)
    if document.keys() != {item.name for item in fields(kind)}:
        raise PeerError(f"{channel.peer} sent a {kind.__name__} with the keys {sorted(document)}")
    values = dict(document)
    for name, hint in hints.items():
        if kind is IntegrityVerdict and isinstance(values[name], dict):
            values[name] = _build(channel, Mismatch, values[name])
        if not _has_type(values[name], hint):
            raise PeerError(f"{channel.peer} sent a {kind.__name__} whose {name} is {values[name]!r}")
    return kind(**values)


def _has_type(value: object, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return value in arguments
    if origin is list:
        return isinstance(value, list) and all(_has_type(item, arguments[0]) for item in value)
    if origin is types.UnionType:
        return any(_has_type(value, argument) for argument in arguments)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)
