"""`endpoint`, which makes a method callable from elsewhere, and `Endpoint`, through which it is called."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, overload

from control.future import Future
from control.runtime import job as runtime
from control.runtime.ports import Awaited, MeshReply, OneReply, ResponseStream, StreamReply
from control.value_mesh import ValueMesh
from control.wire.envelope import Envelope, Kind, Payload
from control.wire.payload import pack_arguments

if TYPE_CHECKING:
    from control.mesh import ActorMesh
    from control.runtime.process import Process

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__control_endpoint__"
_KINDS = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
    inspect.Parameter.KEYWORD_ONLY,
    inspect.Parameter.VAR_KEYWORD,
)


@dataclass(frozen=True, slots=True)
class EndpointOptions:
    """What `endpoint` was told."""

    explicit_response_port: bool = False


@overload
def endpoint(method: F, /) -> F: ...
@overload
def endpoint(*, explicit_response_port: bool = False) -> Callable[[F], F]: ...
def endpoint(method: F | None = None, /, *, explicit_response_port: bool = False) -> F | Callable[[F], F]:
    """Mark a method of an `Actor` as callable from elsewhere; within the actor it stays a plain method.

    Args:
        method: the method, when used without parentheses.
        explicit_response_port: the method takes a `Port` after ``self`` and answers by ``port.send(value)``, when it
            likes and from any thread; what it returns is ignored. The caller does not notice.
    """

    def mark(function: F) -> F:
        setattr(function, _MARK, EndpointOptions(explicit_response_port))
        return function

    return mark if method is None else mark(method)


def endpoint_options(method: object) -> EndpointOptions | None:
    """The options of a method marked by `endpoint`, None for others."""
    return getattr(method, _MARK, None)


@dataclass(frozen=True, slots=True)
class EndpointSpec:
    """An endpoint as callers need to know it.

    Attributes:
        name: the method's.
        parameters: name, kind (`inspect.Parameter.kind`) and whether there is a default, of those a caller gives.
        is_async: whether it is an ``async def``.
        explicit_response_port: whether it answers through a port.
    """

    name: str
    parameters: tuple[tuple[str, int, bool], ...]
    is_async: bool
    explicit_response_port: bool


@functools.cache
def _checker(spec: EndpointSpec) -> Callable[..., None]:
    """A function of the endpoint's signature that does nothing: calling it checks arguments at the speed of a call."""
    parameters = [
        inspect.Parameter(name, _KINDS[kind], default=None if has_default else inspect.Parameter.empty)
        for name, kind, has_default in spec.parameters
    ]
    namespace: dict[str, Any] = {}
    exec(f"def {spec.name}{inspect.Signature(parameters)}: pass", namespace)
    return namespace[spec.name]  # type: ignore[no-any-return]


class Endpoint:
    """One endpoint of the actors of a mesh; each adverb below is a way of calling it.

    Every adverb checks the arguments against the endpoint's signature and pickles them before anything is sent, and
    raises `TypeError` or `PayloadError` if they do not fit. They return at once; messages of one sender to one actor
    arrive in the order of the calls, whatever the adverb.
    """

    __slots__ = ("_awaited", "_check", "_members", "_mesh", "_turns", "spec")

    def __init__(self, mesh: ActorMesh[Any], spec: EndpointSpec) -> None:
        self.spec = spec
        self._mesh = mesh
        self._members = mesh._view_members()
        self._check = _checker(spec)
        self._awaited = tuple(
            Awaited(member.id, f"{mesh.name}{point!r}" if point else mesh.name, spec.name)
            for member, point in zip(self._members, mesh.extent.points(), strict=True)
        )
        self._turns = itertools.count()

    def call_one(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call the only actor of the mesh.

        Returns:
            The future of what the endpoint returns.

        Raises:
            ValueError: the mesh has several actors; `slice` it, or use `call` or `choose`.
            TypeError: the arguments do not fit the signature.
            PayloadError: an argument cannot be pickled.
        """
        if len(self._members) != 1:
            raise ValueError(
                f"{self._mesh.name}.{self.spec.name}.call_one needs a mesh of one actor, this one has "
                f"{self._mesh.extent!r}: slice it, or use call or choose"
            )
        return self._send_to(0, args, kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Future[ValueMesh[Any]]:
        """Call every actor of the mesh.

        Returns:
            The future of their results. It ends with the first error as soon as one comes.

        Raises:
            TypeError: the arguments do not fit the signature.
            PayloadError: an argument cannot be pickled.
        """
        payload = self._pack(args, kwargs)
        process = runtime.current()
        future: Future[ValueMesh[Any]] = Future()
        port = process.ports.open(MeshReply(future, self._mesh.extent, self._awaited))
        self._cast(process, payload, port)
        return future

    def broadcast(self, *args: Any, **kwargs: Any) -> None:
        """Send to every actor of the mesh and forget about it: an exception in the endpoint kills its actor.

        Raises:
            TypeError: the arguments do not fit the signature.
            PayloadError: an argument cannot be pickled.
        """
        self._cast(runtime.current(), self._pack(args, kwargs), 0)

    def choose(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call one actor of the mesh, each in its turn.

        Raises:
            TypeError: the arguments do not fit the signature.
            PayloadError: an argument cannot be pickled.
        """
        return self._send_to(next(self._turns) % len(self._members), args, kwargs)

    def stream(self, *args: Any, **kwargs: Any) -> ResponseStream:
        """Call every actor of the mesh and take the results as they come.

        Returns:
            ``async for`` yields results in the order of completion, ``for`` yields a future for each.

        Raises:
            TypeError: the arguments do not fit the signature.
            PayloadError: an argument cannot be pickled.
        """
        payload = self._pack(args, kwargs)
        process = runtime.current()
        stream = ResponseStream(len(self._members))
        self._cast(process, payload, process.ports.open(StreamReply(stream, self._awaited)))
        return stream

    def _pack(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Payload:
        self._check(*args, **kwargs)
        return pack_arguments(args, kwargs)

    def _send_to(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        payload = self._pack(args, kwargs)
        process = runtime.current()
        future: Future[Any] = Future()
        port = process.ports.open(OneReply(future, self._awaited[index]))
        envelope = Envelope(Kind.CALL, self._mesh.uid, payload, self.spec.name, port)
        process.send(self._members[index], envelope)
        return future

    def _cast(self, process: Process, payload: Payload, port: int) -> None:
        uid, name, extent = self._mesh.uid, self.spec.name, self._mesh.extent
        for rank, member in enumerate(self._members):
            process.send(member, Envelope(Kind.CALL, uid, payload, name, port, rank, extent))

    def __repr__(self) -> str:
        return f"<endpoint {self._mesh.name}.{self.spec.name}>"
