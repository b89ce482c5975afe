"""How frozen dataclasses with slots are pickled: those that may gain fields, and those that stay as they are.

Both give the same objects as the pickling of `dataclasses`, in a fraction of the time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def growing(cls: type[T]) -> type[T]:
    """Let a frozen dataclass with slots gain fields after the others, each with a default.

    If the pickling side knows fewer fields, the others have their defaults here; fields that only that side knows are
    left out.
    """
    quickly_pickled(cls)
    names = _names_of(cls)
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}  # type: ignore[arg-type]  # it is one

    def set_state(self: T, state: Sequence[Any]) -> None:
        for name, value in zip(names, state, strict=False):
            _put(self, name, value)
        for name in names[len(state) :]:
            _put(self, name, defaults[name])

    cls.__setstate__ = set_state  # type: ignore[attr-defined]
    return cls


def quickly_pickled(cls: type[T]) -> type[T]:
    """Make a frozen dataclass with slots look its fields up once, not for each object that is pickled or unpickled."""
    names = _names_of(cls)

    def get_state(self: T) -> list[Any]:
        return [getattr(self, name) for name in names]

    def set_state(self: T, state: Sequence[Any]) -> None:
        for name, value in zip(names, state, strict=True):
            _put(self, name, value)

    cls.__getstate__ = get_state  # type: ignore[method-assign, assignment]
    cls.__setstate__ = set_state  # type: ignore[attr-defined]
    return cls


def _names_of(cls: type) -> list[str]:
    """The names of the fields. A class that is pickled by value has no slots yet when its functions are unpickled."""
    return [field.name for field in dataclasses.fields(cls)]


_put = object.__setattr__
