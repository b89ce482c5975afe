"""How frozen dataclasses with slots are pickled: those that may gain fields, and those that stay as they are.

Both become what `dataclasses` makes of them, in a fraction of the time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def growing(cls: type[T]) -> type[T]:
    """Let a frozen dataclass with slots gain fields behind the others, each with a default.

    Of one that was pickled where fewer fields are known, the others have their defaults; what is known only there is
    left out.
    """
    quickly_pickled(cls)
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]  # it is one
    slots = _slots_of(cls)

    def set_state(self: T, state: Sequence[Any]) -> None:
        for put, value in zip(slots, state, strict=False):
            put(self, value)
        for put, field in zip(slots[len(state) :], fields[len(state) :], strict=True):
            put(self, field.default)

    cls.__setstate__ = set_state  # type: ignore[attr-defined]
    return cls


def quickly_pickled(cls: type[T]) -> type[T]:
    """Have a frozen dataclass with slots look its fields up once, not for each object that is pickled or unpickled."""
    slots = _slots_of(cls)
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]  # it is one

    def get_state(self: T) -> list[Any]:
        return [getattr(self, name) for name in names]

    def set_state(self: T, state: Sequence[Any]) -> None:
        for put, value in zip(slots, state, strict=True):
            put(self, value)

    cls.__getstate__ = get_state  # type: ignore[method-assign, assignment]
    cls.__setstate__ = set_state  # type: ignore[attr-defined]
    return cls


def _slots_of(cls: type) -> list[Callable[[Any, Any], None]]:
    """What sets the fields of an object of a class, although it is frozen."""
    return [getattr(cls, field.name).__set__ for field in dataclasses.fields(cls)]
