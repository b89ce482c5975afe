"""What the script and the workers agree on about the user's functions: what to run, arguments, kinds of results."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Source = str | bytes
"""A function: the path to it, or pickled."""

IGNORED, EXPECTED, WHOLE, ANSWER = range(4)
"""How the result is used: not at all, as the parts that the script expects, one object, or one pickled answer."""

TENSOR, INPUT, OBJECT = range(3)
"""Kinds of results: ``(TENSOR, the input that it is a view of, or None)``, ``(INPUT, which)``, ``(OBJECT, None)``."""

Kind = tuple[int, int | None]

VALUE, GROUP = "value", "group"
"""Placeholders in pickled arguments: ``(VALUE, its number)``, ``(GROUP, a ProcessGroupSpec)``."""


@dataclass(frozen=True, slots=True)
class Task:
    """The description of a remote function for a worker, once for each kind of results.

    Attributes:
        source: the function.
        use: how the result is used.
        kinds: the tensors and objects in the result, as the script expects them.
        has_groups: whether there are process groups among the arguments.
    """

    source: Source
    use: int
    kinds: tuple[Kind, ...] = ()
    has_groups: bool = False


@dataclass(frozen=True, slots=True)
class ProcessGroupSpec:
    """The description of a process group for workers.

    Attributes:
        number: unique in the script.
        groups: the numbers of the workers of each group.
        ranks: for each of these workers, its rank in its root mesh.
    """

    number: int
    groups: tuple[tuple[int, ...], ...]
    ranks: tuple[tuple[int, ...], ...]


def unpack(
    data: bytes, values: Sequence[Any], group_of: Callable[[ProcessGroupSpec], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that the script has packed.

    Args:
        data: as packed.
        values: what to put in place of the values, by number.
        group_of: makes a process group from its description.
    """
    args, kwargs = _ArgumentUnpickler(io.BytesIO(data), values, group_of).load()
    return args, kwargs


class _ArgumentUnpickler(pickle.Unpickler):
    def __init__(self, source: io.BytesIO, values: Sequence[Any], group_of: Callable[[ProcessGroupSpec], Any]) -> None:
        super().__init__(source)
        self._values = values
        self._group_of = group_of

    def persistent_load(self, found: tuple[str, Any]) -> Any:
        kind, what = found
        return self._values[what] if kind == VALUE else self._group_of(what)
