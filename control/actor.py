"""`Actor`, the base class, and `ActorInterface`: what others need to know of an actor class to call it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from control.endpoint import EndpointSpec, endpoint_options
from control.errors import ActorDefinitionError
from control.failure import MeshFailure

_INTERFACE = "__control_interface__"


class Actor:
    """Base class of actors: private state in a process of the job, reached through its endpoints alone.

    An actor has a thread of its own. Its endpoints are either all plain methods, which run on that thread, or all
    ``async def``, which run on the event loop of that thread; they run one at a time in either case.

    Besides ``__init__`` and endpoints, a subclass may define (plain or ``async``):

    * ``__supervise__(self, failure)``: see `Actor.__supervise__`.
    * ``__cleanup__(self, error)``: called once when the actor stops (``error`` is None) or has failed, after the
      meshes that it owns have ended.
    """

    def __supervise__(self, failure: MeshFailure) -> object:
        """Called when a mesh that this actor owns has failed.

        It runs between messages and also while a message is being handled: in an async actor at any ``await``, in a
        sync one while it waits for a future.

        Returns:
            A true value if that settles the matter. Otherwise, as here, this actor fails too.
        """
        return None

    def __cleanup__(self, error: Exception | None) -> object:
        """Called once at the end of the actor; here it does nothing."""
        return None


@dataclass(frozen=True, slots=True)
class ActorInterface:
    """The endpoints of an actor class, without the class: references carry it, so that holding one imports nothing.

    Attributes:
        class_name: for people.
        endpoints: by name.
        is_async: whether the endpoints are ``async``.
    """

    class_name: str
    endpoints: dict[str, EndpointSpec]
    is_async: bool


def interface_of(cls: type) -> ActorInterface:
    """The interface of an actor class.

    Raises:
        ActorDefinitionError: the class cannot be spawned; the message says why.
    """
    if not (isinstance(cls, type) and issubclass(cls, Actor)):
        raise ActorDefinitionError(f"{cls!r} is no subclass of control.Actor")
    known = cls.__dict__.get(_INTERFACE)
    if known is None:
        known = _read_interface(cls)
        setattr(cls, _INTERFACE, known)
    return cast(ActorInterface, known)


def _read_interface(cls: type) -> ActorInterface:
    specs: dict[str, EndpointSpec] = {}
    for name in dir(cls):
        method = inspect.getattr_static(cls, name)
        options = endpoint_options(method)
        if options is not None:
            specs[name] = _spec(cls, name, method, explicit_response_port=options.explicit_response_port)
    async_names = [name for name, spec in specs.items() if spec.is_async]
    sync_names = [name for name, spec in specs.items() if not spec.is_async]
    if async_names and sync_names:
        raise ActorDefinitionError(
            f"{cls.__qualname__} mixes async endpoints ({', '.join(async_names)}) with sync ones "
            f"({', '.join(sync_names)}): a sync endpoint would block the event loop on which the async ones wait. "
            "Make them all async or all sync."
        )
    return ActorInterface(cls.__qualname__, specs, bool(async_names))


def _spec(cls: type, name: str, method: Callable[..., Any], *, explicit_response_port: bool) -> EndpointSpec:
    where = f"{cls.__qualname__}.{name}"
    if name in _RESERVED_NAMES or name.startswith("_"):
        raise ActorDefinitionError(
            f"{where}: a mesh of actors has an attribute of that name; call the endpoint another"
        )
    parameters = list(inspect.signature(method).parameters.values())
    hidden = 2 if explicit_response_port else 1
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if len(parameters) < hidden or any(parameter.kind not in positional for parameter in parameters[:hidden]):
        expected = "self and the response port" if explicit_response_port else "self"
        raise ActorDefinitionError(f"{where}: its first parameters must be {expected}")
    visible = tuple((p.name, int(p.kind), p.default is not p.empty) for p in parameters[hidden:])
    return EndpointSpec(name, visible, inspect.iscoroutinefunction(method), explicit_response_port)


_RESERVED_NAMES = frozenset(
    {"extent", "flatten", "has_actors", "initialized", "name", "rename", "root_extent", "root_members"}
    | {"size", "slice", "split", "stop", "uid"}
)
