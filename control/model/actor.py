"""`ActorBase`: an actor as its process sees it. `ActorInterface`: what others need to know of its class to call it."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from skipper.control.model.endpoint_spec import (
    WRAPPED,
    EndpointOptions,
    EndpointSpec,
    check_member,
    endpoint_options,
    is_idempotent,
)
from skipper.control.model.errors import ActorDefinitionError
from skipper.control.model.failure import MeshFailure
from skipper.control.model.growing import quickly_pickled

_INTERFACE = "__control_interface__"


class ActorBase:
    """What the runtime needs of every actor. Users derive from `control.Actor`, which derives from this."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, member in vars(cls).items():
            check_member(f"{cls.__qualname__}.{name}", member)

    @functools.cached_property
    def logger(self) -> logging.Logger:
        """The logger named for this actor's class, set up as others are: levels and handlers are the program's.

        Its records, as all that actors make, have the fields ``actor_name``, ``actor_rank`` and ``actor_prefix``.
        """
        return logging.getLogger(type(self).__name__)

    def __supervise__(self, failure: MeshFailure) -> object:
        """Called when a mesh that this actor owns has failed.

        It runs between messages and also while a message is being handled: in an async actor at any ``await``, in a
        sync one while it waits for a future, also in ``__init__``. If it raises, this actor fails, with ``failure`` as
        the cause.

        Returns:
            A true value if the failure is handled. Otherwise, as here, this actor fails too.
        """
        return None

    def __cleanup__(self, error: Exception | None) -> object:
        """Called once at the end of the actor; here it does nothing."""
        return None


_EXPLICIT_PORT = ":port"
"""What follows the name of a plain method that is called with an explicit response port."""


@quickly_pickled
@dataclass(frozen=True, slots=True)
class ActorInterface:
    """The methods of an actor class, without the class: references carry it, so that holding one imports nothing.

    Attributes:
        class_name: for people.
        endpoints: by name.
        methods: public methods that are no endpoints, by name, for `as_endpoint`.
        is_async: whether the endpoints are ``async``; if there are no endpoints, whether those methods are.
    """

    class_name: str
    endpoints: dict[str, EndpointSpec]
    methods: dict[str, EndpointSpec]
    is_async: bool

    def find(self, wire_name: str) -> EndpointSpec:
        """What a call names.

        Raises:
            KeyError: there is no such method.
        """
        spec = self.endpoints.get(wire_name)
        if spec is None and wire_name.endswith(WRAPPED):
            return dataclasses.replace(self.find(wire_name.removesuffix(WRAPPED)), is_wrapped=True)
        if spec is None:
            name = wire_name.removesuffix(_EXPLICIT_PORT)
            spec = self.as_endpoint(name, explicit_response_port=name != wire_name)
        return spec

    def as_endpoint(self, name: str, *, explicit_response_port: bool) -> EndpointSpec:
        """A plain method as an endpoint.

        Raises:
            KeyError: there is no such method.
            TypeError: the method takes no response port.
            ActorDefinitionError: the method is ``async`` in a sync actor, or the other way round.
        """
        spec = self.methods[name]
        where = f"{self.class_name}.{name}"
        if spec.is_async != self.is_async:
            kinds = ("async", "sync") if spec.is_async else ("sync", "async")
            raise ActorDefinitionError(f"{where} is {kinds[0]} and its actor {kinds[1]}: it cannot be an endpoint")
        if not explicit_response_port:
            return spec
        if not spec.parameters or spec.parameters[0][1] not in _POSITIONAL:
            raise TypeError(f"{where} takes no response port as its first argument")
        return dataclasses.replace(
            spec, parameters=spec.parameters[1:], explicit_response_port=True, wire_name=name + _EXPLICIT_PORT
        )


def interface_of(cls: object) -> ActorInterface:
    """The interface of an actor class.

    Raises:
        ActorDefinitionError: the class cannot be spawned; the message says why.
    """
    if not (isinstance(cls, type) and issubclass(cls, ActorBase)):
        raise ActorDefinitionError(f"{cls!r} is not a subclass of control.Actor")
    known = cls.__dict__.get(_INTERFACE)
    if known is None:
        known = _read_interface(cls)
        setattr(cls, _INTERFACE, known)
    return cast(ActorInterface, known)


def check_construction(cls: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check that arguments fit ``__init__``, before anything is sent.

    Raises:
        TypeError: they do not.
    """
    try:
        inspect.signature(cls).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{cls.__qualname__}.__init__: {error}") from None


def _read_interface(cls: type) -> ActorInterface:
    endpoints: dict[str, EndpointSpec] = {}
    methods: dict[str, EndpointSpec] = {}
    for name in dir(cls):
        method = inspect.getattr_static(cls, name)
        check_member(f"{cls.__qualname__}.{name}", method)
        options = endpoint_options(method)
        if options is not None:
            endpoints[name] = _endpoint(cls, name, method, options)
        elif not name.startswith("_") and inspect.isfunction(method) and _hides(method, 1):
            methods[name] = _spec(name, method, EndpointOptions())
    async_names = [name for name, spec in endpoints.items() if spec.is_async]
    sync_names = [name for name, spec in endpoints.items() if not spec.is_async]
    if async_names and sync_names:
        raise ActorDefinitionError(
            f"{cls.__qualname__} mixes async endpoints ({', '.join(async_names)}) with sync ones "
            f"({', '.join(sync_names)}): a sync endpoint would block the event loop on which the async ones wait. "
            "Make them all async or all sync."
        )
    called = endpoints or methods
    is_async = bool(called) and all(spec.is_async for spec in called.values())
    return ActorInterface(cls.__qualname__, endpoints, methods, is_async)


def _endpoint(cls: type, name: str, method: Callable[..., Any], options: EndpointOptions) -> EndpointSpec:
    where = f"{cls.__qualname__}.{name}"
    if name in _RESERVED_NAMES or name.startswith("_"):
        raise ActorDefinitionError(
            f"{where}: a mesh of actors has an attribute of that name; give the endpoint another name"
        )
    if not _hides(method, 2 if options.explicit_response_port else 1):
        expected = "self and the response port" if options.explicit_response_port else "self"
        raise ActorDefinitionError(f"{where}: its first parameters must be {expected}")
    if options.concurrent and not inspect.iscoroutinefunction(method):
        raise ActorDefinitionError(
            f"{where}: a concurrent endpoint must be async, so that several calls can wait at once"
        )
    return _spec(name, method, options)


_POSITIONAL = (int(inspect.Parameter.POSITIONAL_ONLY), int(inspect.Parameter.POSITIONAL_OR_KEYWORD))


def _hides(method: Callable[..., Any], count: int) -> bool:
    """Whether the method has the first parameters that the runtime fills."""
    parameters = list(inspect.signature(method).parameters.values())[:count]
    return len(parameters) == count and all(int(parameter.kind) in _POSITIONAL for parameter in parameters)


def _spec(name: str, method: Callable[..., Any], options: EndpointOptions) -> EndpointSpec:
    hidden = 2 if options.explicit_response_port else 1
    parameters = list(inspect.signature(method).parameters.values())[hidden:]
    return EndpointSpec(
        name,
        tuple(
            (parameter.name, int(parameter.kind), parameter.default is not parameter.empty) for parameter in parameters
        ),
        inspect.iscoroutinefunction(method),
        options.explicit_response_port,
        options.concurrent,
        name,
        is_idempotent=is_idempotent(method),
        gives_pairs=options.gives_pairs,
    )


_RESERVED_NAMES = frozenset(
    {"extent", "flatten", "has_actors", "initialized", "members", "name", "over", "rename", "root_extent"}
    | {"root_members", "size", "sizes", "slice", "split", "stop", "uid", "with_successors"}
)
