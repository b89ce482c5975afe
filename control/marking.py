"""`endpoint`, which makes a method callable from elsewhere, and what callers need to know of such a method."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, overload

F = TypeVar("F", bound=Callable[..., Any])
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
    """What `endpoint` or `concurrent_endpoint` was told."""

    explicit_response_port: bool = False
    concurrent: bool = False
    propagate: object = None


@overload
def endpoint(method: F, /) -> F: ...
@overload
def endpoint(*, explicit_response_port: bool = False, propagate: object = None) -> Callable[[F], F]: ...
def endpoint(
    method: F | None = None, /, *, explicit_response_port: bool = False, propagate: object = None
) -> F | Callable[[F], F]:
    """Mark a method of an `Actor` as callable from elsewhere; within the actor it stays a plain method.

    Args:
        method: the method, when used without parentheses.
        explicit_response_port: the method takes a `Port` after ``self`` and answers by ``port.send(value)``, when it
            likes and from any thread; what it returns is ignored. The caller does not notice. An exception that it
            raises ends the actor: answer with ``port.exception(error)`` where it is to live on.
        propagate: how the script knows what `Endpoint.rref` gives without waiting for it: see there.
    """

    def mark(function: F) -> F:
        setattr(function, _MARK, EndpointOptions(explicit_response_port, propagate=propagate))
        return function

    return mark if method is None else mark(method)


@overload
def concurrent_endpoint(method: F, /) -> F: ...
@overload
def concurrent_endpoint(*, explicit_response_port: bool = False, propagate: object = None) -> Callable[[F], F]: ...
def concurrent_endpoint(
    method: F | None = None, /, *, explicit_response_port: bool = False, propagate: object = None
) -> F | Callable[[F], F]:
    """Mark an ``async def`` of an `Actor` as an endpoint for which later messages need not wait.

    It starts in its turn, as others do; where it awaits, the actor goes on with its next message. So an actor may be
    called back by somebody whom it is calling. `stop` waits for all that have started.

    Args:
        method: the method, when used without parentheses.
        explicit_response_port: as for `endpoint`.
        propagate: as for `endpoint`.
    """

    def mark(function: F) -> F:
        setattr(function, _MARK, EndpointOptions(explicit_response_port, concurrent=True, propagate=propagate))
        return function

    return mark if method is None else mark(method)


def endpoint_options(method: object) -> EndpointOptions | None:
    """The options of a method marked by `endpoint`, None for others."""
    return getattr(method, _MARK, None)


def idempotent(method: F) -> F:
    """Mark a method as safe to be run more than once for one call: a second run does no harm and answers as well.

    Whoever calls such a method may send its request again when nobody can tell whether the first one was handled, as
    after the death of the process that had it. It stands above or below `endpoint` and `concurrent_endpoint`, and on
    methods of plain classes.
    """
    setattr(method, _IDEMPOTENT, True)
    return method


def is_idempotent(method: object) -> bool:
    """Whether a method is marked by `idempotent`."""
    return getattr(method, _IDEMPOTENT, False) is True


@dataclass(frozen=True, slots=True)
class EndpointSpec:
    """An endpoint as callers need to know it.

    Attributes:
        name: the method's.
        parameters: name, kind (`inspect.Parameter.kind`) and whether there is a default, of those a caller gives.
        is_async: whether it is an ``async def``.
        explicit_response_port: whether it answers through a port.
        concurrent: whether later messages need not wait for it.
        wire_name: what calls name it by; differs from ``name`` where the caller chose the options (`as_endpoint`), or
            has something else run in its place (`Endpoint.wrapped`).
        is_wrapped: whether the first argument is called with the method in place of the method itself.
        is_idempotent: whether a request may be handled twice (`idempotent`).
    """

    name: str
    parameters: tuple[tuple[str, int, bool], ...]
    is_async: bool
    explicit_response_port: bool
    concurrent: bool
    wire_name: str
    is_wrapped: bool = False
    is_idempotent: bool = False


WRAPPED = ":wrapped"
"""What follows the name of an endpoint in whose place something else runs."""


@functools.cache
def checker(spec: EndpointSpec) -> Callable[..., None]:
    """A function of the endpoint's signature that does nothing: calling it checks arguments at the speed of a call."""
    parameters = [
        inspect.Parameter(name, _KINDS[kind], default=None if has_default else inspect.Parameter.empty)
        for name, kind, has_default in spec.parameters
    ]
    namespace: dict[str, Any] = {}
    exec(f"def {spec.name}{inspect.Signature(parameters)}: pass", namespace)
    return namespace[spec.name]  # type: ignore[no-any-return]
