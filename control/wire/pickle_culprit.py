"""`find_culprit`: which part of a value cannot be pickled, for the message of the error."""

from __future__ import annotations

import itertools
import time
import types
from collections.abc import Callable, Iterator

_DEPTH = 16
_BREADTH = 10_000
"""So many parts of one container are tried."""
_PATIENCE_S = 1.0
"""The search ends after this, with as much as it knows."""
_MOST_KEY = 60


def find_culprit(
    value: object, name: str | tuple[str, ...], can_pickle: Callable[[object], bool]
) -> tuple[str, object]:
    """The innermost part that cannot be pickled, and the way to it, such as ``args[1]['lock']``.

    Args:
        value: what could not be pickled.
        name: of the value, for people; or of each element, if it is a tuple.
        can_pickle: tries one value.
    """
    deadline = time.monotonic() + _PATIENCE_S
    if isinstance(name, tuple):
        named = zip(name, value, strict=False) if isinstance(value, tuple) else iter(())
        where, part = _first(named, can_pickle, deadline) or ("the value", value)
    else:
        where, part = name, value
    for _ in range(_DEPTH):
        inner = _first(itertools.islice(_parts(where, part), _BREADTH), can_pickle, deadline)
        if inner is None:
            break
        where, part = inner
    return where, part


def _first(
    parts: Iterator[tuple[str, object]], can_pickle: Callable[[object], bool], deadline: float
) -> tuple[str, object] | None:
    for where, part in parts:
        if time.monotonic() > deadline:
            return None
        if not can_pickle(part):
            return where, part
    return None


def _parts(where: str, value: object) -> Iterator[tuple[str, object]]:
    """What a value is made of, as far as pickle would look at it part by part; each part with the way to it."""
    kind = type(value)
    if isinstance(value, dict) and kind is dict:
        for key, part in value.items():
            shown = repr(key)[:_MOST_KEY] if type(key) in (str, int, bool, float) else f"<{type(key).__qualname__}>"
            yield f"{where}[{shown}]", part
            yield f"a key of {where}", key
    elif isinstance(value, list | tuple) and kind in (list, tuple):
        for index, part in enumerate(value):
            yield f"{where}[{index}]", part
    elif isinstance(value, set | frozenset) and kind in (set, frozenset):
        for part in value:
            yield f"an element of {where}", part
    elif isinstance(value, types.FunctionType):
        for variable, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield f"the variable {variable!r} that {where} uses", cell.cell_contents
            except ValueError:  # it is not set yet
                continue
    elif kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__:
        attributes = getattr(value, "__dict__", None)
        if type(attributes) is dict and not isinstance(value, type):
            for attribute, part in attributes.items():
                yield f"{where}.{attribute}", part
