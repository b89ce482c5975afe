"""`growing`: what is pickled may gain fields, and still be understood by who knows fewer of them, or more."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def growing(cls: type[T]) -> type[T]:
    """Let a frozen dataclass with slots gain fields behind the others, each with a default.

    Of one that was pickled where fewer fields are known, the others have their defaults; what is known only there is
    left out.
    """
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]  # it is one

    def set_state(self: T, state: Sequence[Any]) -> None:
        for field, value in zip(fields, state, strict=False):
            object.__setattr__(self, field.name, value)
        for field in fields[len(state) :]:
            object.__setattr__(self, field.name, field.default)

    cls.__setstate__ = set_state  # type: ignore[attr-defined]
    return cls
