"""`endpoint`, which makes a method callable from elsewhere, and `Endpoint`, through which it is called."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, overload

from control.context import current_context
from control.future import Future
from control.port import pack_with_ports
from control.runtime import job as runtime
from control.runtime.notices import notice_number
from control.runtime.ports import Awaited, MeshReply, OneReply, ResponseStream, StreamReply
from control.value_mesh import ValueMesh
from control.wire.envelope import Envelope, Kind, Payload

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
    """What `endpoint` or `concurrent_endpoint` was told."""

    explicit_response_port: bool = False
    concurrent: bool = False


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


@overload
def concurrent_endpoint(method: F, /) -> F: ...
@overload
def concurrent_endpoint(*, explicit_response_port: bool = False) -> Callable[[F], F]: ...
def concurrent_endpoint(method: F | None = None, /, *, explicit_response_port: bool = False) -> F | Callable[[F], F]:
    """Mark an ``async def`` of an `Actor` as an endpoint for which later messages need not wait.

    It starts in its turn, as others do; where it awaits, the actor goes on with its next message. So an actor may be
    called back by somebody whom it is calling. `stop` waits for all that have started.

    Args:
        method: the method, when used without parentheses.
        explicit_response_port: as for `endpoint`.
    """

    def mark(function: F) -> F:
        setattr(function, _MARK, EndpointOptions(explicit_response_port, concurrent=True))
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
        concurrent: whether later messages need not wait for it.
        wire_name: what calls name it by; differs from ``name`` where the caller chose the options (`as_endpoint`).
    """

    name: str
    parameters: tuple[tuple[str, int, bool], ...]
    is_async: bool
    explicit_response_port: bool
    concurrent: bool
    wire_name: str


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
    raises `TypeError` or `PayloadError` if they do not fit. They return at once, unless the actor is too far behind
    (see `BackpressureError`). Messages of one sender to one actor arrive in the order of the calls, with any adverb.
    """

    __slots__ = ("_awaited", "_check", "_members", "_mesh", "_turns", "spec")

    def __init__(self, mesh: ActorMesh[Any], spec: EndpointSpec) -> None:
        self.spec = spec
        self._mesh = mesh
        self._members = mesh._view_members()
        self._check = _checker(spec)
        self._awaited = tuple(
            Awaited(actor.process.id, f"{mesh.name}{point!r}" if point else mesh.name, spec.name, actor)
            for actor, point in zip(mesh._actors(), mesh.extent.points(), strict=True)
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
        payload = self._pack(args, kwargs, self._awaited)
        process = runtime.current()
        future: Future[ValueMesh[Any]] = Future()
        port = process.ports.open(MeshReply(future, self._mesh.extent, self._awaited))
        self._cast(process, payload, port)
        return future

    def broadcast(self, *args: Any, **kwargs: Any) -> None:
        """Send to every actor of the mesh and forget about it: an exception in the endpoint kills its actor.

        A message that cannot be delivered, since its actor is dead or has been stopped, fails the sender, unless the
        sender owns the mesh and is told of its failure anyway.

        Raises:
            TypeError: the arguments do not fit the signature.
            PayloadError: an argument cannot be pickled.
        """
        payload = self._pack(args, kwargs, self._awaited)
        self._cast(runtime.current(), payload, self._notice())

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
        payload = self._pack(args, kwargs, self._awaited)
        process = runtime.current()
        stream = ResponseStream(len(self._members))
        self._cast(process, payload, process.ports.open(StreamReply(stream, self._awaited)))
        return stream

    def _pack(self, args: tuple[Any, ...], kwargs: dict[str, Any], to: Sequence[Awaited]) -> Payload:
        self._check(*args, **kwargs)
        payload, ports = pack_with_ports(args, kwargs)
        for port in ports:
            # The actor that owed this answer passes the debt on: the caller is told if those who have it now all die.
            port._link([awaited.actor for awaited in to if awaited.actor is not None], ())
        return payload

    def _send_to(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        awaited = self._awaited[index]
        payload = self._pack(args, kwargs, (awaited,))
        process = runtime.current()
        future: Future[Any] = Future()
        port = process.ports.open(OneReply(future, awaited))
        envelope = Envelope(Kind.CALL, self._mesh.uid, payload, self.spec.wire_name, port)
        process.send(self._members[index], envelope)
        return future

    def _notice(self) -> int:
        """Where the actor whose code runs is told if a message is not delivered; 0 outside of actors."""
        here = current_context.get()
        sender = runtime.current().root_cell if here is None else here.actor_instance._cell
        return 0 if sender is None else notice_number(sender, self._mesh.uid, self._mesh.name)

    def _cast(self, process: Process, payload: Payload, port: int) -> None:
        process.cast(
            self._members,
            Envelope(Kind.CALL, self._mesh.uid, payload, self.spec.wire_name, port, extent=self._mesh.extent),
        )

    def __repr__(self) -> str:
        return f"<endpoint {self._mesh.name}.{self.spec.name}>"


class PlainMethod:
    """A method of the actors of a mesh that is no endpoint: `as_endpoint` makes one of it, for the caller alone."""

    __slots__ = ("_mesh", "_name")

    def __init__(self, mesh: ActorMesh[Any], name: str) -> None:
        self._mesh = mesh
        self._name = name

    def __getattr__(self, adverb: str) -> Any:
        raise AttributeError(
            f"{self._mesh.name}.{self._name} is no endpoint, so that it has no {adverb!r}: mark the method with "
            f"@endpoint, or call it as as_endpoint(mesh.{self._name}).{adverb}(...)"
        )

    def __repr__(self) -> str:
        return f"<method {self._mesh.name}.{self._name}>"


def as_endpoint(method: object, *, explicit_response_port: bool = False) -> Endpoint:
    """The endpoint of a method that its class does not mark as one: ``as_endpoint(mesh.method).call_one(...)``.

    For classes that cannot be changed. The method runs as endpoints do, in its turn.

    Args:
        method: an attribute of a mesh of actors, named for a public method; an endpoint is returned as it is.
        explicit_response_port: the method takes a `Port` after ``self`` and answers through it (see `endpoint`).

    Raises:
        TypeError: ``method`` is no attribute of a mesh, it is an endpoint with other options, or it does not take a
            response port as it should.
        ActorDefinitionError: (a `TypeError`) the method is ``async`` in a sync actor, or the other way round.
    """
    if isinstance(method, Endpoint):
        if method.spec.explicit_response_port != explicit_response_port:
            raise TypeError(f"{method!r} is an endpoint already, and its class decides on its response port")
        return method
    if not isinstance(method, PlainMethod):
        raise TypeError(f"as_endpoint takes a method of a mesh of actors, such as mesh.method, not {method!r}")
    mesh = method._mesh
    return Endpoint(mesh, mesh._interface.as_endpoint(method._name, explicit_response_port=explicit_response_port))
