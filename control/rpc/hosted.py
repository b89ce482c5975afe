"""What an `ActorServer` serves: an object of a plain class, or a mesh of actors."""

from __future__ import annotations

import functools
import inspect
import secrets
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from skipper.control.api.mesh import interface_in, subscribe
from skipper.control.model.endpoint_spec import endpoint_options, is_idempotent
from skipper.control.model.errors import NoSuchMethodError
from skipper.control.rpc.scope import Scope, serving
from skipper.control.rpc.wire.messages import MethodInfo

if TYPE_CHECKING:
    from skipper.control.api.views import ActorMesh

_HANDLE_NBYTES = 12

RunAsync = Callable[[Any, Scope], Any]
"""Runs what an ``async`` method has returned to its end, within the limits of the call."""


class BusyError(Exception):
    """Too many calls wait already."""


class LateError(Exception):
    """The time of a call ended before its turn came."""


class ConcurrencyLimit:
    """Limits how many calls an actor runs at a time; for any number of threads.

    Args:
        places: how many calls may run at a time.
        max_waiting: how many calls may wait for their turn.
    """

    def __init__(self, places: int, *, max_waiting: int) -> None:
        self._free = places
        self._max_waiting = max_waiting
        self._lock = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()

    def enter(self, timeout: float | None) -> None:
        """Wait in this thread until a call may run.

        Raises:
            BusyError: too many calls wait already.
            LateError: the turn did not come within ``timeout`` seconds.
        """
        with self._lock:
            if self._free > 0:
                self._free -= 1
                return
            if len(self._waiting) >= self._max_waiting:
                raise BusyError
            gate = threading.Lock()
            gate.acquire()
            self._waiting.append(gate)
        if gate.acquire(timeout=-1 if timeout is None else timeout):
            return
        with self._lock:
            if gate in self._waiting:
                self._waiting.remove(gate)
                raise LateError
        # The turn came at the same moment as the time-out: pass it on to the next call.
        self.leave()
        raise LateError

    def leave(self) -> None:
        """End a call, so that the next one may run."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._free += 1


class Hosted(ABC):
    """An actor under a name.

    Attributes:
        name: its registered name.
        handle: identifies this actor: a later one with the name has another handle.
        class_name: name of its class, for people.
    """

    def __init__(self, name: str, class_name: str) -> None:
        self.name = name
        self.handle = secrets.token_hex(_HANDLE_NBYTES)
        self.class_name = class_name

    @abstractmethod
    def methods(self) -> tuple[MethodInfo, ...]:
        """The methods that can be called."""

    @abstractmethod
    def call(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], scope: Scope) -> Any:
        """Call a method, and wait in this thread for its result.

        Raises:
            NoSuchMethodError: there is none of this name.
            BusyError: too many calls wait for their turn.
            LateError: the time ended before it was called, or before it had ended.
            Exception: any exception that the method raises.
        """


class PlainActor(Hosted):
    """An object of any class: its public methods, ``concurrency`` at a time, in the order of the calls."""

    def __init__(self, name: str, instance: object, *, concurrency: int, max_waiting: int, run_async: RunAsync) -> None:
        super().__init__(name, type(instance).__qualname__)
        self._instance = instance
        self._limit = ConcurrencyLimit(concurrency, max_waiting=max_waiting)
        self._run_async = run_async
        self._methods = public_methods(type(instance))

    def methods(self) -> tuple[MethodInfo, ...]:
        """The methods that can be called."""
        return tuple(describe(name, method) for name, method in self._methods.items())

    def call(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], scope: Scope) -> Any:
        """Call a method in its turn."""
        if method not in self._methods:
            raise NoSuchMethodError(f"{self.class_name} has no public method {method!r}")
        self._limit.enter(scope.remaining_s())
        try:
            if scope.is_cancelled:
                raise LateError
            with serving(scope):
                result = getattr(self._instance, method)(*args, **kwargs)
                return self._run_async(result, scope) if inspect.isawaitable(result) else result
        finally:
            self._limit.leave()


class MeshActor(Hosted):
    """A mesh of actors: a call is a ``call_one`` if it has one actor, and a ``call`` if it has several.

    Attributes:
        ended: ends with the mesh's first failure, or when all its actors have been stopped.
    """

    def __init__(self, name: str, mesh: ActorMesh[Any]) -> None:
        interface = interface_in(mesh)
        super().__init__(name, interface.class_name)
        self._mesh = mesh
        self._endpoints = interface.endpoints
        self.ended = subscribe(mesh).recv()

    def methods(self) -> tuple[MethodInfo, ...]:
        """The endpoints of the actors."""
        return tuple(
            MethodInfo(each.name, _signature(each.parameters), "", each.is_idempotent)
            for each in self._endpoints.values()
        )

    def call(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], scope: Scope) -> Any:
        """Call an endpoint and wait for all answers."""
        if method not in self._endpoints:
            raise NoSuchMethodError(f"{self.class_name} has no endpoint {method!r}")
        endpoint = getattr(self._mesh, method)
        future = (endpoint.call_one if self._mesh.size == 1 else endpoint.call)(*args, **kwargs)
        return future.get(scope.remaining_s())


def public_methods(cls: Any) -> Mapping[str, Callable[..., Any]]:
    """The methods of a class that clients can call: those without a leading underscore."""
    return _public_methods(cls)  # type checkers require a hashable argument for it


@functools.cache
def _public_methods(cls: Any) -> Mapping[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {}
    for name in dir(cls):
        if not name.startswith("_"):
            method = inspect.getattr_static(cls, name)
            plain = method.__func__ if isinstance(method, staticmethod | classmethod) else method
            if callable(plain) and not isinstance(plain, type):
                found[name] = plain
    return found


def describe(name: str, method: Callable[..., Any]) -> MethodInfo:
    """Describe a method for callers in any language."""
    try:
        signature = str(inspect.signature(method))
    except (TypeError, ValueError):  # the class is not written in Python
        signature = "(...)"
    return MethodInfo(name, signature, inspect.getdoc(method) or "", is_idempotent(method))


@functools.cache
def checker(cls: Any, name: str) -> Callable[..., Any]:
    """A function that raises `TypeError` for arguments that do not fit a method of ``cls``.

    Raises:
        AttributeError: there is no such method.
    """
    method = public_methods(cls).get(name)
    if method is None:
        raise AttributeError(f"{cls.__qualname__} has no public method {name!r}")
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):
        return lambda *args, **kwargs: None
    options = endpoint_options(method)
    hidden = 1 if not isinstance(inspect.getattr_static(cls, name), staticmethod) else 0
    hidden += 1 if options is not None and options.explicit_response_port else 0
    parameters = list(signature.parameters.values())
    starred = [each for each in parameters[:hidden] if each.kind is each.VAR_POSITIONAL]
    bind = signature.replace(parameters=starred + parameters[hidden:]).bind
    if not any(each.kind in (each.KEYWORD_ONLY, each.VAR_KEYWORD) for each in parameters):
        least = sum(each.default is each.empty and each.kind is not each.VAR_POSITIONAL for each in parameters[hidden:])
        most = len(parameters) - hidden if not any(each.kind is each.VAR_POSITIONAL for each in parameters) else 1 << 30

        def check(*args: Any, **kwargs: Any) -> None:
            if kwargs or not least <= len(args) <= most:
                bind(*args, **kwargs)

        return check
    return bind


def _signature(parameters: tuple[tuple[str, int, bool], ...]) -> str:
    listed = ", ".join(f"{name}=..." if has_default else name for name, _, has_default in parameters)
    return f"(self, {listed})" if listed else "(self)"
