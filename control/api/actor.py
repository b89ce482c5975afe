"""`Actor`, the base class of actors, and the decorators that make methods of it callable from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar, Unpack, overload

from skipper.control.api.service import ServiceOptions, ServiceTemplate
from skipper.control.model.actor import ActorBase
from skipper.control.model.endpoint_spec import EndpointOptions, marked

if TYPE_CHECKING:
    from skipper.control.api.views import (
        AsyncMark,
        AsyncPortMark,
        EndpointMethod,
        Mark,
        MeshAttributes,
        PortMark,
        Service,
        ServiceKeywords,
    )
else:
    MeshAttributes = type  # the attributes of a mesh are for type checkers: see control/api/views.pyi

A = TypeVar("A", bound="Actor")
P = ParamSpec("P")
R = TypeVar("R")


class Actor(ActorBase, metaclass=MeshAttributes):
    """Base class of actors: private state in a process of the job, which others reach only through endpoints.

    An actor has a thread of its own. Its endpoints are either all plain methods, which run on that thread, or all
    ``async def``, which run on the event loop of that thread; they run one at a time in either case.

    In addition to ``__init__`` and endpoints, a subclass may define (plain or ``async``):

    * ``__supervise__(self, failure)``: see `Actor.__supervise__`.
    * ``__cleanup__(self, error)``: called once when the actor stops (``error`` is None) or has failed, after the
      meshes that it owns have ended.

    Raises:
        ActorDefinitionError: (a `TypeError`; where a subclass is defined) an endpoint is hidden in a static method, a
            class method or a property.

    Example:
        ```python
        from skipper.control import Actor, endpoint, this_host

        class Counter(Actor):
            def __init__(self, start: int) -> None:
                self.value = start

            @endpoint
            def add(self, amount: int) -> int:
                self.value += amount
                return self.value

        counters = this_host().spawn_procs({"gpus": 2}).spawn("counters", Counter, 10)
        print(counters.add.call(1).get())  # [11, 11]
        ```
    """

    @overload
    @classmethod
    def options(
        cls: Callable[P, A], *, procs: Literal[1] = 1, **options: Unpack[ServiceKeywords]
    ) -> ServiceTemplate[P, Service[A]]: ...
    @overload
    @classmethod
    def options(cls: Callable[P, A], *, procs: int, **options: Unpack[ServiceKeywords]) -> ServiceTemplate[P, Any]: ...
    @classmethod
    def options(cls: Any, **options: Any) -> ServiceTemplate[..., Any]:
        """Options for a service of this class: ``Cls.options(num_replicas=4).as_service(...)``.

        Args:
            **options: see `control.services.ServiceOptions`; all have defaults.

        Raises:
            TypeError: there is no such option, or it has the wrong type.
            ValueError: a number is out of its range.
        """
        return ServiceTemplate(cls, ServiceOptions(**options))


@overload
def endpoint(method: Callable[Concatenate[Any, P], R], /) -> EndpointMethod[Callable[P, R]]: ...
@overload
def endpoint(*, explicit_response_port: Literal[False] = False, propagate: object = None) -> Mark: ...
@overload
def endpoint(*, explicit_response_port: Literal[True], propagate: object = None) -> PortMark: ...
def endpoint(method: Any = None, /, *, explicit_response_port: bool = False, propagate: object = None) -> Any:
    """Mark a method of an `Actor` as callable from elsewhere; within the actor it stays a plain method.

    Args:
        method: the method, when used without parentheses.
        explicit_response_port: the method takes a `Port` after ``self`` and answers by ``port.send(value)``, at any
            time and from any thread; its return value is ignored. Callers see no difference. An exception that it
            raises ends the actor: answer with ``port.exception(error)`` if the actor should stay alive.
        propagate: how the script knows the result of `Endpoint.rref` without waiting for it: see there.

    Raises:
        ActorDefinitionError: (a `TypeError`) this cannot be an endpoint: it is a generator, it is marked already, its
            name is reserved by Python, or it is not a plain function.
    """
    return marked(method, EndpointOptions(explicit_response_port, propagate=propagate))


@overload
def concurrent_endpoint(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], /
) -> EndpointMethod[Callable[P, Coroutine[Any, Any, R]]]: ...
@overload
def concurrent_endpoint(*, explicit_response_port: Literal[False] = False, propagate: object = None) -> AsyncMark: ...
@overload
def concurrent_endpoint(*, explicit_response_port: Literal[True], propagate: object = None) -> AsyncPortMark: ...
def concurrent_endpoint(
    method: Any = None, /, *, explicit_response_port: bool = False, propagate: object = None
) -> Any:
    """Mark an ``async def`` of an `Actor` as an endpoint that runs concurrently with later messages.

    Its calls start in order, like those of other endpoints. While one awaits, the actor handles its next message. So an
    actor can be called back by the actor that it is calling. `stop` waits for all calls that have started.

    Args:
        method: the method, when used without parentheses.
        explicit_response_port: as for `endpoint`.
        propagate: as for `endpoint`.

    Raises:
        ActorDefinitionError: as for `endpoint`.
    """
    return marked(method, EndpointOptions(explicit_response_port, concurrent=True, propagate=propagate))
