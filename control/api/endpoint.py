"""`Endpoint`: a method of the actors of a mesh, and the ways of calling it."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import types
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, cast, overload

from skipper.control.api.mesh_base import actors_of
from skipper.control.api.tensor_engine_plugin import engine, is_for_engine
from skipper.control.model.actor import ActorInterface
from skipper.control.model.endpoint_spec import WRAPPED, EndpointSpec, checker, endpoint_options
from skipper.control.model.errors import PayloadError
from skipper.control.model.future import Future, Promise
from skipper.control.model.method_view import MethodView
from skipper.control.model.value_mesh import PairMesh, ValueMesh
from skipper.control.runtime import current_runtime as runtime
from skipper.control.runtime import tracing
from skipper.control.runtime.context import current_context, local_actor
from skipper.control.runtime.interfaces import ReplyHandler
from skipper.control.runtime.port import Port, link_port, pack_with_ports
from skipper.control.runtime.ports import Awaited, MeshReply, OneReply, ResponseStream, StreamReply, notice_number
from skipper.control.wire.messages import Call, Payload

if TYPE_CHECKING:
    from skipper.control.api import views
    from skipper.control.api.mesh import ActorMesh
    from skipper.control.api.views import P_any
    from skipper.control.runtime.process import Process
else:
    P_any = ParamSpec("P_any")


A = TypeVar("A")
P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Endpoint(MethodView, Generic[P, R_co]):
    """One endpoint of the actors of a mesh; each adverb below is a way of calling it.

    Tensors of the actors' mesh (see `ProcMesh.activate`) may be among the arguments: each actor gets its own shard, as
    a plain tensor. The call is ordered with the operations of the tensor engine, which continue when the endpoint has
    returned.

    Every adverb checks the arguments against the endpoint's signature and pickles them before anything is sent, and
    raises `TypeError` or `PayloadError` if they do not fit. It returns at once, unless the actor has too many unhandled
    messages (see `BackpressureError`). Messages of one sender to one actor arrive in the order of the calls, with any
    adverb. The returned futures raise `ActorError` if the endpoint raised, and `SupervisionError` if the actor cannot
    answer.

    Example:
        ```python
        from skipper.control import Actor, endpoint, this_host

        class Worker(Actor):
            @endpoint
            def double(self, value: int) -> int:
                return 2 * value

        workers = this_host().spawn_procs({"gpus": 2}).spawn("workers", Worker)
        print(workers.double.call(21).get())  # [42, 42]
        print(workers.slice(gpus=1).double.call_one(4).get())  # 8
        print([future.get() for future in workers.double.stream(5)])  # [10, 10]
        workers.double.broadcast(1)  # no answer is wanted
        ```
    """

    __slots__ = ("_actor_class", "_check", "_members", "_mesh", "_propagate", "_turns", "awaited", "spec")

    def __init__(
        self, mesh: ActorMesh[Any], spec: EndpointSpec, actor_class: type | None, propagate: object = None
    ) -> None:
        self.spec = spec
        self._actor_class = actor_class
        self._propagate = propagate
        self._mesh = mesh
        self._members = tuple(mesh.members)
        self._check = checker(spec)
        self.awaited = tuple(
            Awaited(actor.process, f"{mesh.name}{point!r}" if point else mesh.name, spec.name, actor)
            for actor, point in zip(actors_of(mesh), mesh.extent.points(), strict=True)
        )
        self._turns = itertools.count()

    def call_one(self, *args: P.args, **kwargs: P.kwargs) -> Future[R_co]:
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

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Future[ValueMesh[R_co]]:
        """Call every actor of the mesh.

        Returns:
            The future of their results. It ends with the first error as soon as one comes.

        Raises:
            TypeError: the arguments do not fit the signature.
            PayloadError: an argument cannot be pickled.
        """
        try:
            payload = self._pack(args, kwargs, self.awaited)
        except PayloadError as error:
            if not self._is_for_engine(error):
                raise
            return self._through_engine("call", args, kwargs)  # type: ignore[no-any-return]
        process = runtime.current()
        future: Promise[ValueMesh[R_co]] = Promise()
        kind = PairMesh if self.spec.gives_pairs else ValueMesh
        self._cast(process, payload, MeshReply(future, self._mesh.extent, self.awaited, kind))
        return future

    def broadcast(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Send to every actor of the mesh, without waiting for results: an exception in the endpoint kills its actor.

        A message that cannot be delivered, because its actor is dead or has been stopped, fails the sender, unless the
        sender owns the mesh and learns of its failure anyway.

        Raises:
            TypeError: the arguments do not fit the signature.
            PayloadError: an argument cannot be pickled.
        """
        try:
            payload = self._pack(args, kwargs, self.awaited)
        except PayloadError as error:
            if not self._is_for_engine(error):
                raise
            self._through_engine("broadcast", args, kwargs)
        else:
            self._cast(runtime.current(), payload, None)

    def choose(self, *args: P.args, **kwargs: P.kwargs) -> Future[R_co]:
        """Call one actor of the mesh; successive calls go to one actor after another.

        Raises:
            TypeError: the arguments do not fit the signature.
            PayloadError: an argument cannot be pickled.
        """
        return self._send_to(next(self._turns) % len(self._members), args, kwargs)

    def stream(self, *args: P.args, **kwargs: P.kwargs) -> ResponseStream[R_co]:
        """Call every actor of the mesh and take the results as they come.

        Returns:
            ``async for`` yields results in the order of completion, ``for`` yields a future for each.

        Raises:
            TypeError: the arguments do not fit the signature.
            PayloadError: an argument cannot be pickled.
        """
        try:
            payload = self._pack(args, kwargs, self.awaited)
        except PayloadError as error:
            if not self._is_for_engine(error):
                raise
            return self._through_engine("stream", args, kwargs)  # type: ignore[no-any-return]
        process = runtime.current()
        stream: ResponseStream[R_co] = ResponseStream(len(self._members))
        self._cast(process, payload, StreamReply(stream, self.awaited))
        return stream

    def rref(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Call every actor of the mesh, in order with the operations of the tensor engine.

        Tensors of the actors' mesh may be among the arguments: each actor gets its own shard, as a plain tensor. What
        the endpoint returns stays where it is; the script gets tensors of the mesh for it, at once.

        The ``propagate`` of `endpoint` says what these look like: a function that is called here with the arguments
        and returns tensors like those that the endpoint returns; see `tensor_engine.script.remote` for what else it can
        be.

        Raises:
            TypeError: the arguments do not fit the signature.
            EngineMissingError: no tensor engine is installed.
        """
        self._check(*args, **kwargs)
        return cast(R_co, engine().rref(self, args, kwargs))

    @property
    def mesh(self) -> views.ActorMesh[Any]:
        """The actors that it calls."""
        return cast("views.ActorMesh[Any]", self._mesh)

    @property
    def propagate(self) -> object:
        """The ``propagate`` of `as_endpoint`, or else that of the actors' class (see `endpoint`); None without one.

        Raises:
            LookupError: this reference was received from another process, without the class.
        """
        if self._propagate is not None:
            return self._propagate
        cls = self._actor_class
        if cls is None:
            raise LookupError(
                f"{self!r}: this reference was sent here, and a sent reference does not carry the class of its "
                "actors: use the reference of the process that spawned them"
            )
        options = endpoint_options(inspect.getattr_static(cls, self.spec.name))
        return None if options is None else options.propagate

    @overload
    def wrapped(self, wrapper: Callable[Concatenate[Any, Q], Coroutine[Any, Any, R]]) -> Endpoint[Q, R]: ...
    @overload
    def wrapped(self, wrapper: Callable[Concatenate[Any, Q], R]) -> Endpoint[Q, R]: ...
    def wrapped(self, wrapper: Callable[..., Any]) -> Endpoint[..., Any]:
        """An endpoint that runs ``wrapper(method, *args, **kwargs)`` in each actor in place of the method.

        Args:
            wrapper: gets the bound method and the arguments of the call, with any signature; ``async`` if the
                endpoint is. It is sent with each call.

        Raises:
            TypeError: the endpoint answers through a port.
        """
        if self.spec.explicit_response_port:
            raise TypeError(
                f"{self!r} answers through a port, so no wrapper can run around it: call the endpoint itself"
            )
        name = self.spec.name
        parameters = (
            ("args", int(inspect.Parameter.VAR_POSITIONAL), False),
            ("kwargs", int(inspect.Parameter.VAR_KEYWORD), False),
        )
        spec = dataclasses.replace(self.spec, parameters=parameters, wire_name=name + WRAPPED, is_wrapped=True)
        return _WrappedEndpoint(self._mesh, spec, self._actor_class, wrapper)

    def _pack(self, args: tuple[Any, ...], kwargs: dict[str, Any], to: Sequence[Awaited]) -> Payload:
        self._check(*args, **kwargs)
        payload, ports = pack_with_ports(args, kwargs)
        for port in ports:
            # The actor that should answer may pass the port on: the caller gets an error if all that have it die.
            link_port(port, [awaited.actor for awaited in to if awaited.actor is not None])
        return payload

    def _send_to(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        awaited = self.awaited[index]
        try:
            payload = self._pack(args, kwargs, (awaited,))
        except PayloadError as error:
            if not self._is_for_engine(error):
                raise
            return self._through_engine("call_one", args, kwargs, index)  # type: ignore[no-any-return]
        reply: OneReply[Any] = OneReply(awaited)
        self.post(runtime.current(), payload, reply, index)
        return reply

    def _is_for_engine(self, error: PayloadError) -> bool:
        """Whether arguments that could not be pickled go through the tensor engine."""
        return is_for_engine(error) and not self.spec.is_wrapped

    def _through_engine(
        self, adverb: str, args: tuple[Any, ...], kwargs: dict[str, Any], index: int | None = None
    ) -> Any:
        """Send arguments that only the tensor engine can take; ``index`` names the only actor to call, None all."""
        if self.spec.explicit_response_port:
            raise TypeError(
                f"{self!r} answers through a port, so its arguments cannot be tensors of a mesh: fetch them first, "
                "by inspect(tensor)"
            )
        endpoint: Endpoint[..., Any] = self
        if index is not None and len(self._members) > 1:
            one = self._mesh.slice(**self._mesh.extent.point(index))
            endpoint = Endpoint(one, self.spec, self._actor_class, self._propagate)
        return engine().send(endpoint, adverb, args, kwargs)

    def post(self, process: Process, payload: Payload, reply: ReplyHandler, index: int = 0, port: int = 0) -> None:
        """Send a packed payload to the actor at ``index`` of the mesh; ``reply`` takes what comes back.

        ``port`` is the number reserved for the reply; 0 uses the next one.

        Raises:
            BackpressureError: there was no room in time; no reply is expected then.
        """
        port = port or process.ports.reserve()
        if tracing.tracer is not None:
            with tracing.tracer.sending(self._described(index, is_awaited=True)) as sending:
                process.ports.open_at(port, sending.until(reply))
                call = Call(self._mesh.uid, port, 0, self.spec.wire_name, payload=payload, trace=sending.traceparent)
                process.send(self._members[index], call)
            return
        process.ports.open_at(port, reply)
        process.send(self._members[index], Call(self._mesh.uid, port, 0, self.spec.wire_name, payload=payload))

    def _notice(self, process: Process) -> int:
        """The port that reports an undelivered message to the running actor; 0 outside of actors."""
        here = current_context.get()
        sender = process.root_actor if here is None else local_actor(here.actor_instance)
        return 0 if sender is None else notice_number(process.ports, sender, self._mesh.uid, self._mesh.name)

    def _cast(self, process: Process, payload: Payload, reply: ReplyHandler | None) -> None:
        if tracing.tracer is not None:
            with tracing.tracer.sending(self._described(None, is_awaited=reply is not None)) as sending:
                reply = None if reply is None else sending.until(reply)
                self._cast_by(process, payload, reply, sending.traceparent)
            return
        self._cast_by(process, payload, reply)

    def _cast_by(self, process: Process, payload: Payload, reply: ReplyHandler | None, trace: bytes = b"") -> None:
        port = self._notice(process) if reply is None else process.ports.open(reply)
        mesh = self._mesh
        call = Call(mesh.uid, port, 0, self.spec.wire_name, mesh.extent, payload=payload, trace=trace)
        process.cast(self._members, call)

    def _described(self, index: int | None, *, is_awaited: bool) -> tracing.TracedCall:
        """A call as the tracer sees it, of one actor or of all."""
        if index is None:
            return tracing.TracedCall(self._mesh.name, self.spec.name, is_awaited, len(self._members), None)
        return tracing.TracedCall(self._mesh.name, self.spec.name, is_awaited, 1, self.awaited[index].actor)

    def _viewed(self) -> tuple[EndpointSpec, type | None]:
        return self.spec, self._actor_class

    def _advice(self) -> str:
        name = f"{self._mesh.name}.{self.spec.name}"
        return (
            f"{name} is an endpoint of other actors and is called by one of its adverbs: {name}.call_one(...) calls "
            "the only actor of a mesh, call(...) all, choose(...) one of them, stream(...) all, with the results as "
            "they come, broadcast(...) all, without results; rref(...) is for tensors of the mesh"
        )

    def __repr__(self) -> str:
        return f"<endpoint {self._mesh.name}.{self.spec.name}>"


class _WrappedEndpoint(Endpoint[..., Any]):
    """What `Endpoint.wrapped` returns."""

    __slots__ = ("_wrapper",)

    def __init__(
        self, mesh: ActorMesh[Any], spec: EndpointSpec, actor_class: type | None, wrapper: Callable[..., Any]
    ) -> None:
        super().__init__(mesh, spec, actor_class)
        self._wrapper = wrapper

    def _pack(self, args: tuple[Any, ...], kwargs: dict[str, Any], to: Sequence[Awaited]) -> Payload:
        return super()._pack((self._wrapper, *args), kwargs, to)


class PlainMethod(MethodView):
    """A method of the actors of a mesh that is not an endpoint: `as_endpoint` makes one of it, for this caller only."""

    __slots__ = ("_actor_class", "_interface", "_mesh", "_name")

    def __init__(self, mesh: ActorMesh[Any], name: str, interface: ActorInterface, actor_class: type | None) -> None:
        self._mesh = mesh
        self._name = name
        self._interface = interface
        self._actor_class = actor_class

    def __getattr__(self, adverb: str) -> Any:
        raise AttributeError(self._advice(adverb))

    def _viewed(self) -> tuple[EndpointSpec, type | None]:
        return self._interface.methods[self._name], self._actor_class

    def _advice(self, adverb: str = "call_one") -> str:
        return (
            f"{self._mesh.name}.{self._name} is not an endpoint: mark the method with @endpoint, or call it as "
            f"as_endpoint(mesh.{self._name}).{adverb}(...)"
        )

    def __repr__(self) -> str:
        return f"<method {self._mesh.name}.{self._name}>"


@overload
def as_endpoint(
    method: Endpoint[P, R], *, explicit_response_port: bool = False, propagate: object = None
) -> Endpoint[P, R]: ...
@overload
def as_endpoint(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]],
    *,
    explicit_response_port: Literal[False] = False,
    propagate: object = None,
) -> Endpoint[P, R]: ...
@overload
def as_endpoint(
    method: Callable[Concatenate[Any, P], R],
    *,
    explicit_response_port: Literal[False] = False,
    propagate: object = None,
) -> Endpoint[P, R]: ...
@overload
def as_endpoint(
    method: Callable[Concatenate[Any, Port[R], P], Any],
    *,
    explicit_response_port: Literal[True],
    propagate: object = None,
) -> Endpoint[P, R]: ...
def as_endpoint(
    method: object, *, explicit_response_port: bool = False, propagate: object = None
) -> Endpoint[..., Any]:
    """The endpoint of a method that its class does not mark as one: ``as_endpoint(mesh.method).call_one(...)``.

    For classes that cannot be changed. The method runs as endpoints do, in its turn.

    Args:
        method: an attribute of a mesh of actors, with the name of a public method; an endpoint stays as it is.
        explicit_response_port: the method takes a `Port` after ``self`` and answers through it (see `endpoint`).
        propagate: how the script knows the result of `Endpoint.rref` (see `endpoint`); it replaces what the class of
            the actors says.

    Raises:
        TypeError: ``method`` is not an attribute of a mesh, it is an endpoint with other options, or it does not take a
            response port as it should.
        ActorDefinitionError: (a `TypeError`) the method is ``async`` in a sync actor, or the other way round.
    """
    if isinstance(method, Endpoint):
        if method.spec.explicit_response_port != explicit_response_port:
            raise TypeError(f"{method!r} is an endpoint already, and its class decides on its response port")
        return method if propagate is None else Endpoint(method._mesh, method.spec, method._actor_class, propagate)
    if not isinstance(method, PlainMethod):
        raise TypeError(f"as_endpoint takes a method of a mesh of actors, such as mesh.method, not {method!r}")
    spec = method._interface.as_endpoint(method._name, explicit_response_port=explicit_response_port)
    return Endpoint(method._mesh, spec, method._actor_class, propagate)


class Accumulator(Generic[A, P_any]):
    """Calls an endpoint of every actor of a mesh and combines the answers into one value.

    Args:
        endpoint: such as ``mesh.loss``.
        identity: the value to begin with; ``combine`` must not change it, because every call begins with it.
        combine: ``combine(value so far, answer)`` gives the new value. Answers are combined in the order in which they
            come, so the order should not matter to it.

    Example:
        ```python
        from skipper.control import Accumulator, Actor, current_rank, endpoint, this_host

        class Shard(Actor):
            @endpoint
            def loss(self) -> float:
                return float(current_rank().rank)

        shards = this_host().spawn_procs({"gpus": 3}).spawn("shards", Shard)
        total = Accumulator(shards.loss, 0.0, lambda so_far, loss: so_far + loss)
        print(total.accumulate().get())  # 3.0
        ```
    """

    def __init__(self, endpoint: Endpoint[P_any, R], identity: A, combine: Callable[[A, R], A]) -> None:
        self._endpoint = endpoint
        self._identity = identity
        self._combine = combine

    def accumulate(self, *args: P_any.args, **kwargs: P_any.kwargs) -> Future[A]:
        """Call every actor.

        Returns:
            The future of the combined value, which ends when every actor has answered or cannot. If several fail,
            it raises the error that came first. ``combine`` runs in the thread that asks first.

        Raises:
            TypeError: the arguments do not fit the endpoint's signature.
            PayloadError: an argument cannot be pickled.
        """
        answers = list(self._endpoint.stream(*args, **kwargs))
        result: Promise[A] = Promise()

        def fold() -> A:
            value = self._identity
            for answer in answers:
                value = self._combine(value, answer.get(0))
            return value

        answers[-1].add_done_callback(lambda _: result.settle_by(fold))  # the last one ends when all have ended
        return result

    if not TYPE_CHECKING:

        def __class_getitem__(cls, parameters: object) -> types.GenericAlias:
            """``Accumulator[float]``: the parameters of the endpoint need not be named."""
            return types.GenericAlias(cls, parameters)

    def __repr__(self) -> str:
        return f"<Accumulator of {self._endpoint!r}>"
