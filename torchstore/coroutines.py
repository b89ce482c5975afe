"""Coroutines of the public functions: one that is never awaited says what was called, and what to write."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")


class NamedCoroutine(Generic[R]):
    """The coroutine of a call of a public function. It is awaited, made into a task and cancelled as any other.

    Python itself would name the function without its package, and not say what to write in its place.
    """

    __slots__ = ("__weakref__", "_coroutine", "_filename", "_is_used", "_line", "_name")

    def __init__(self, coroutine: Coroutine[Any, Any, R], name: str, filename: str, line: int) -> None:
        self._coroutine = coroutine
        self._name = name
        self._filename = filename
        self._line = line
        self._is_used = False

    def __await__(self) -> Generator[Any, Any, R]:
        self._is_used = True
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        """As that of a coroutine."""
        self._is_used = True
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        """As that of a coroutine."""
        self._is_used = True
        return self._coroutine.throw(*error)

    def close(self) -> None:
        """As that of a coroutine."""
        self._is_used = True
        self._coroutine.close()

    def __getattr__(self, name: str) -> Any:
        # What shows tasks to people looks at `cr_frame` and the like, and at `__qualname__`.
        return getattr(self._coroutine, name)

    def __repr__(self) -> str:
        return f"<coroutine {self._name}>"

    def __del__(self) -> None:
        if not self._is_used:
            self._coroutine.close()
            blocking = f"torchstore.sync.{self._name.removeprefix('torchstore.')}"
            warnings.warn_explicit(
                f"coroutine '{self._name}' was never awaited, and has done nothing: "
                f"write `await {self._name}(...)`, or `{blocking}(...)` where there is no event loop",
                RuntimeWarning,
                self._filename,
                self._line,
            )


Coroutine.register(NamedCoroutine)


def public(function: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, Coroutine[Any, Any, R]]:
    """Let the coroutines of a public function of the package be `NamedCoroutine`."""
    name = f"torchstore.{function.__name__}"

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        coroutine = function(*args, **kwargs)
        caller = sys._getframe(1)
        return cast(
            "Coroutine[Any, Any, R]", NamedCoroutine(coroutine, name, caller.f_code.co_filename, caller.f_lineno)
        )

    if sys.version_info >= (3, 12):  # before, nothing can say of a plain function that it returns coroutines
        return inspect.markcoroutinefunction(call)
    return call


def is_public(function: object) -> bool:
    """Whether a function is one that `public` has made."""
    return inspect.isfunction(function) and inspect.iscoroutinefunction(inspect.unwrap(function))
