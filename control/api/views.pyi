"""The types of meshes and services for type checkers: an actor class as its callers see it. None of it runs.

A type checker has two views of a class ``C``: that of its instances, and that of the class itself, ``type[C]``. The
code of an actor uses the first one: ``self.add(1)`` is a plain call. Code with a mesh uses the second one: to a type
checker `ActorMesh` of ``C`` is ``type[C]``. There an endpoint is a `RemoteEndpoint`, which has adverbs in place of a
call; the methods of the mesh itself are those of `MeshAttributes`, the metaclass of `Actor`; and plain methods lack
their ``self``, so that calling them is an error. Services and sessions have the same types.
"""

from abc import ABCMeta
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from types import TracebackType
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Protocol, TypedDict, TypeVar, overload

from typing_extensions import ParamSpec as DefaultParamSpec
from typing_extensions import TypeVar as DefaultTypeVar

from skipper.control.api.actor import Actor
from skipper.control.api.endpoint import Endpoint
from skipper.control.api.mesh import HostMesh, ProcMesh
from skipper.control.api.service import ReplicaMetrics
from skipper.control.model.future import Future
from skipper.control.model.method_view import MethodView
from skipper.control.model.shape import AxisSelection, Extent, Size
from skipper.control.model.value_mesh import ValueMesh
from skipper.control.runtime.port import Port
from skipper.control.wire.process_ref import ProcessRef

A = TypeVar("A", bound=Actor)
T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
T_any = DefaultTypeVar("T_any", default=Any)
P_any = DefaultParamSpec("P_any", default=...)
F_co = TypeVar("F_co", bound=Callable[..., Any], covariant=True)

ActorMesh = type[A]
Service = type[A]
Session = type[A]

class ServiceMethod(MethodView, Generic[P, R_co]):
    """The adverbs of `control.services.ServiceMethod`, which describes them."""

    def route(self, *args: P.args, **kwargs: P.kwargs) -> Future[R_co]:
        """Call the replica that has the fewest requests of this process outstanding, or wait for one to come up.

        On a session: call the replica of the session. See `ServiceMethod.route` and `SessionMethod.route`.
        """

    @overload
    def fanout(self, *args: P.args, **kwargs: P.kwargs) -> Future[ValueMesh[R_co]]:
        """Call every replica: all at once, or ``rolling`` of them at a time. See `ServiceMethod.fanout`."""

    @overload
    def fanout(
        self, *args: Any, rolling: int | None, absent: Literal["wait", "skip"] = "wait", **kwargs: Any
    ) -> Future[ValueMesh[R_co]]: ...
    @overload
    def fanout(self, *args: Any, absent: Literal["wait", "skip"], **kwargs: Any) -> Future[ValueMesh[R_co]]: ...

class RemoteEndpoint(Endpoint[P, R_co], ServiceMethod[P, R_co]):
    """An endpoint as an attribute of a mesh, of a service or of a session: the types do not show which.

    There is no such object at run time.
    """

class EndpointMethod(Generic[F_co]):
    """The type that `control.endpoint` gives to a method.

    ``F_co`` is the method without ``self``. An ``async`` one answers with the result of its coroutine.
    """

    @overload
    def __get__(
        self: EndpointMethod[Callable[P, Coroutine[Any, Any, R]]], instance: None, owner: Any
    ) -> RemoteEndpoint[P, R]: ...
    @overload
    def __get__(self: EndpointMethod[Callable[P, R]], instance: None, owner: Any) -> RemoteEndpoint[P, R]: ...
    @overload
    def __get__(self, instance: object, owner: Any) -> F_co: ...

class PortEndpointMethod(Generic[F_co]):
    """The same with ``explicit_response_port=True``: callers do not give the port, and get what is sent to it."""

    @overload
    def __get__(
        self: PortEndpointMethod[Callable[Concatenate[Port[R], P], Any]], instance: None, owner: Any
    ) -> RemoteEndpoint[P, R]: ...
    @overload
    def __get__(self, instance: object, owner: Any) -> F_co: ...

class Mark(Protocol):
    """``@endpoint(propagate=...)``."""

    def __call__(self, method: Callable[Concatenate[Any, P], R], /) -> EndpointMethod[Callable[P, R]]:
        """Mark a method."""

class AsyncMark(Protocol):
    """``@concurrent_endpoint(propagate=...)``."""

    def __call__(
        self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], /
    ) -> EndpointMethod[Callable[P, Coroutine[Any, Any, R]]]:
        """Mark a method."""

class PortMark(Protocol):
    """``@endpoint(explicit_response_port=True)``."""

    def __call__(
        self, method: Callable[Concatenate[Any, Port[R], P], T], /
    ) -> PortEndpointMethod[Callable[Concatenate[Port[R], P], T]]:
        """Mark a method."""

class AsyncPortMark(Protocol):
    """``@concurrent_endpoint(explicit_response_port=True)``."""

    def __call__(
        self, method: Callable[Concatenate[Any, Port[R], P], Coroutine[Any, Any, T]], /
    ) -> PortEndpointMethod[Callable[Concatenate[Port[R], P], Coroutine[Any, Any, T]]]:
        """Mark a method."""

class MeshAttributes(ABCMeta):
    """The attributes of `control.ActorMesh`, `control.services.Service` and `control.services.Session`.

    They are described there. Those that are no methods are properties here, so that an actor may have attributes of
    the same names.
    """

    # Meshes
    @property
    def uid(cls) -> int:
        """See `ActorMesh.uid`."""

    @property
    def extent(cls) -> Extent:
        """See `ActorMesh.extent`."""

    @property
    def size(cls) -> Size:
        """See `ActorMesh.size`."""

    @property
    def sizes(cls) -> dict[str, int]:
        """See `ActorMesh.sizes`."""

    @property
    def root_extent(cls) -> Extent:
        """See `ActorMesh.root_extent`."""

    @property
    def root_members(cls) -> Sequence[ProcessRef]:
        """See `ActorMesh.root_members`."""

    @property
    def members(cls) -> Sequence[ProcessRef]:
        """See `ActorMesh.members`."""

    @property
    def has_actors(cls) -> bool:
        """See `ActorMesh.has_actors`."""

    def slice(cls: type[T], **selection: AxisSelection) -> type[T]:
        """See `ActorMesh.slice`."""

    def rename(cls: type[T], **names: str) -> type[T]:
        """See `ActorMesh.rename`."""

    def flatten(cls: type[T], name: str) -> type[T]:
        """See `ActorMesh.flatten`."""

    def split(cls: type[T], **axes: Mapping[str, int]) -> type[T]:
        """See `ActorMesh.split`."""

    def over(cls: type[T], procs: ProcMesh) -> type[T]:
        """See `ActorMesh.over`."""

    def with_successors(cls: type[T], procs: ProcMesh, /, *args: Any, **kwargs: Any) -> type[T]:
        """See `ActorMesh.with_successors`."""

    # Meshes and services
    @property
    def name(cls) -> str:
        """See `ActorMesh.name`."""

    @property
    def initialized(cls) -> Future[Any]:
        """See `ActorMesh.initialized`."""

    def stop(cls) -> Future[None]:
        """See `ActorMesh.stop`."""

    # Services
    def session(cls: type[T]) -> type[T]:
        """See `Service.session`."""

    def scale(cls, num_replicas: int) -> Future[None]:
        """See `Service.scale`."""

    def drain(cls, replica: int) -> Future[None]:
        """See `Service.drain`."""

    def metrics(cls) -> Future[list[ReplicaMetrics]]:
        """See `Service.metrics`."""

    def __await__(cls: type[T]) -> Generator[Any, None, type[T]]:
        """See `Service`."""

    # Sessions
    @property
    def replica(cls) -> int | None:
        """See `Session.replica`."""

    def close(cls) -> None:
        """See `Session.close`."""

    def __enter__(cls: type[T]) -> type[T]:
        """See `Session`."""

    def __exit__(
        cls, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """See `Session`."""

class ServiceKeywords(TypedDict, total=False):
    """The attributes of `control.services.ServiceOptions` except ``procs``."""

    with_gpus: bool
    num_replicas: int
    hosts: HostMesh | None
    env: Mapping[str, str] | None
    bootstrap: Callable[[], object] | None
    setup: str | None
    health: str | None
    health_interval_s: float
    health_timeout_s: float
    retries: int
    max_restarts: int
    stable_s: float
    backoff_s: float
    drain_timeout_s: float
