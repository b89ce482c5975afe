"""Coroutines of the public functions: the warning about one that is never awaited says what to write instead."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Coroutine, Generator
from types import CodeType
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


_USED = -1


class NamedCoroutine(Generic[R]):
    """The coroutine of a call of a public function. It can be awaited, made into a task and cancelled like any other.

    Python itself would name the function without its package, and not say what to write instead.
    """

    __slots__ = ("__weakref__", "_called_at", "_caller", "_coroutine")

    _name: str
    _coroutine: Coroutine[Any, Any, R]
    _caller: CodeType
    _called_at: int

    def __await__(self) -> Generator[Any, Any, R]:
        self._called_at = _USED
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        """The same as for a plain coroutine."""
        self._called_at = _USED
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        """The same as for a plain coroutine."""
        self._called_at = _USED
        return self._coroutine.throw(*error)

    def close(self) -> None:
        """The same as for a plain coroutine."""
        self._called_at = _USED
        self._coroutine.close()

    def __getattr__(self, name: str) -> Any:
        # Tools that show tasks read `cr_frame` and similar attributes, and `__qualname__`.
        return getattr(self._coroutine, name)

    def __repr__(self) -> str:
        return f"<coroutine torchstore.{self._name}>"

    def __del__(self) -> None:
        if self._called_at == _USED:
            return
        self._coroutine.close()
        lines = (line for start, end, line in self._caller.co_lines() if start <= self._called_at < end)
        name = f"torchstore.{self._name}"
        warnings.warn_explicit(
            f"coroutine '{name}' was never awaited, and did nothing: "
            f"write `await {name}(...)`, or `torchstore.sync.{self._name}(...)` without an event loop",
            RuntimeWarning,
            self._caller.co_filename,
            next(lines, None) or self._caller.co_firstlineno,
        )


Coroutine.register(NamedCoroutine)


def public(function: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, Coroutine[Any, Any, R]]:
    """Let the coroutines of a public function of the package be `NamedCoroutine`."""
    kind: type[NamedCoroutine[R]] = type(
        "NamedCoroutine", (NamedCoroutine,), {"__slots__": (), "_name": function.__name__}
    )
    make, caller = kind.__new__, sys._getframe

    # Small values are read in about 20 us: each step here counts, and a constructor would be too slow.
    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        coroutine = function(*args, **kwargs)
        named = make(kind)
        named._coroutine = coroutine
        frame = caller(1)
        named._caller, named._called_at = frame.f_code, frame.f_lasti
        return named  # type checkers learn this only from `Coroutine.register`

    if sys.version_info >= (3, 12):  # older ones have no mark for functions that return coroutines
        return inspect.markcoroutinefunction(call)
    return call


def is_public(function: object) -> bool:
    """Whether `public` has made this function."""
    return inspect.isfunction(function) and inspect.iscoroutinefunction(inspect.unwrap(function))
