"""What makes a method an endpoint, and what callers need to know of such a method."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from skipper.control.model.errors import ActorDefinitionError
from skipper.control.model.growing import quickly_pickled

F = TypeVar("F")
_MARK = "__control_endpoint__"
_IDEMPOTENT = "__control_idempotent__"
_KINDS = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
    inspect.Parameter.KEYWORD_ONLY,
    inspect.Parameter.VAR_KEYWORD,
)


@dataclass(frozen=True, slots=True)
class EndpointOptions:
    """The options of `control.endpoint` or `control.concurrent_endpoint`."""

    explicit_response_port: bool = False
    concurrent: bool = False
    propagate: object = None
    gives_pairs: bool = False


def marked(method: Any, options: EndpointOptions) -> Any:
    """The method, marked; or, without one, the decorator that marks."""

    def mark(method: Any) -> Any:
        check_markable(method, options)
        setattr(method, _MARK, options)
        return method

    return mark if method is None else mark(method)


def check_markable(method: object, options: EndpointOptions) -> None:
    """Check that something marked by ``@endpoint`` can be an endpoint.

    Raises:
        ActorDefinitionError: it cannot; the message says why, and what to do.
    """
    decorator = "@concurrent_endpoint" if options.concurrent else "@endpoint"
    name = getattr(method, "__qualname__", None) or repr(method)
    if isinstance(method, type) or not callable(method) or not hasattr(method, "__get__") or _within(method):
        raise ActorDefinitionError(
            f"{decorator} is for methods with self, and {name} is {_kind(method)}: mark a plain "
            "method, which can use it"
        )
    if endpoint_options(method) is not None:
        raise ActorDefinitionError(f"{name} is marked as an endpoint twice: keep one of the two decorators")
    if getattr(method, "__name__", "").startswith("__"):
        raise ActorDefinitionError(
            f"{name}: a name that begins with two underscores cannot be an endpoint's, since Python uses such names "
            "itself: choose another name"
        )
    if inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
        raise ActorDefinitionError(
            f"{name} is a generator, and an endpoint answers a call once: return a list, or take the Port of a Channel "
            "as an argument and send it one value after the other"
        )


def check_member(where: str, member: object) -> None:
    """Check that a member of a class hides no endpoint, as ``@staticmethod`` above ``@endpoint`` would.

    Raises:
        ActorDefinitionError: it hides one; ``where`` names the member in the message.
    """
    if (within := _within(member)) is not None and endpoint_options(within) is not None:
        raise ActorDefinitionError(
            f"{where} is {_kind(member)}, and no endpoint can be one: mark a plain method, which can use it"
        )


def _within(member: object) -> object | None:
    """The function inside a static method, class method, property or partial; None for any other member."""
    if isinstance(member, staticmethod | classmethod):
        return member.__func__
    if isinstance(member, property):
        return member.fget
    if isinstance(member, functools.cached_property | functools.partialmethod | functools.partial):
        return member.func
    return None


def _kind(member: object) -> str:
    """The kind of a member of a class that is no method, for people."""
    if isinstance(member, type):
        return "a class"
    name = type(member).__name__
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def endpoint_options(method: object) -> EndpointOptions | None:
    """The options of a method marked by `endpoint`, None for others."""
    return getattr(method, _MARK, None)


def idempotent(method: F) -> F:
    """Mark a method as safe to run more than once for one call: a second run does no harm and gives an answer too.

    A caller may send the request again when it is not known whether the first one was handled, for example after the
    death of the process that had it. The decorator goes above or below `endpoint` and `concurrent_endpoint`, and on
    methods of plain classes.
    """
    setattr(method, _IDEMPOTENT, True)
    return method


def is_idempotent(method: object) -> bool:
    """Whether a method is marked by `idempotent`."""
    return getattr(method, _IDEMPOTENT, False) is True


@quickly_pickled
@dataclass(frozen=True, slots=True)
class EndpointSpec:
    """An endpoint as callers need to know it.

    Attributes:
        name: the method's.
        parameters: name, kind (`inspect.Parameter.kind`) and whether there is a default, of those a caller gives.
        is_async: whether it is an ``async def``.
        explicit_response_port: whether it answers through a port.
        concurrent: whether later messages need not wait for it.
        wire_name: its name in calls; differs from ``name`` if the caller chose the options (`as_endpoint`), or
            if something else runs in its place (`Endpoint.wrapped`).
        is_wrapped: whether the first argument runs in place of the method, and gets the method.
        is_idempotent: whether a request may be handled twice (`idempotent`).
        gives_pairs: whether the results of `Endpoint.call` are iterated in pairs (`control.monarch`).
    """

    name: str
    parameters: tuple[tuple[str, int, bool], ...]
    is_async: bool
    explicit_response_port: bool
    concurrent: bool
    wire_name: str
    is_wrapped: bool = False
    is_idempotent: bool = False
    gives_pairs: bool = False


WRAPPED = ":wrapped"
"""Suffix of the name of an endpoint if something else runs in its place."""


def parameters_of(spec: EndpointSpec, *, default: object) -> list[inspect.Parameter]:
    """The parameters that a caller gives. Each optional one has ``default`` as its default."""
    return [
        inspect.Parameter(name, _KINDS[kind], default=default if has_default else inspect.Parameter.empty)
        for name, kind, has_default in spec.parameters
    ]


@functools.cache
def checker(spec: EndpointSpec) -> Callable[..., None]:
    """A function with the signature of the endpoint that does nothing. Calling it checks arguments."""
    namespace: dict[str, Any] = {}
    exec(f"def {spec.name}{inspect.Signature(parameters_of(spec, default=None))}: pass", namespace)
    return namespace[spec.name]  # type: ignore[no-any-return]
