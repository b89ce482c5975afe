"""The key under which the script remembers what an operation on arguments of one kind returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from skipper.tensor_engine.errors import NotPropagatableError
from skipper.tensor_engine.script.tensor import Tensor

Special = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]
"""What is done in place of issuing an operation: called with the overload and its arguments."""

PLAIN = frozenset(
    {int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, complex, float}
)
"""Types whose values may be part of a key, with the type beside them: 1, 1.0 and True are equal."""


class Facts:
    """What the script knows of an overload of torch.

    Attributes:
        by_type: the arguments, by position and by name, whose numbers do not change the shape of the result.
        writes: the arguments that it changes.
        special: what is done in place of issuing it.
    """

    __slots__ = ("by_type", "special", "writes")

    def __init__(self, func: Any, special: Special | None) -> None:
        self.by_type: frozenset[int | str] = frozenset()
        if not func._schema.name.removeprefix("aten::").startswith(("arange", "linspace", "logspace", "range")):
            self.by_type = frozenset(
                where
                for index, argument in enumerate(func._schema.arguments)
                if str(argument.type).removeprefix("Optional[").removesuffix("]") in ("number", "float", "Tensor")
                or str(argument.type) == "List[number]"
                for where in (index, argument.name)
            )
        self.writes = tuple(
            argument.name if argument.kwarg_only else index
            for index, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        self.special = special


def walk(func: Any, argument: Any, by_type: bool, key: list[Any], tensors: list[Tensor], constants: list[Any]) -> bool:
    """Add an argument of any type to a key.

    Returns:
        False where it holds a tensor of the script.
    """
    kind = type(argument)
    if kind is Tensor:
        key.append(argument.remote_value.meta)
        tensors.append(argument)
    elif kind in PLAIN:
        key.append(kind)
        if by_type and isinstance(argument, int | float | complex):
            constants.append(argument)
        else:
            key.append(argument)
    elif kind is list or kind is tuple:
        key.append(kind)
        key.append(len(argument))
        return all(walk(func, item, by_type, key, tensors, constants) for item in argument)
    elif isinstance(argument, torch.Tensor):
        return False
    elif isinstance(argument, list | tuple):
        return walk(func, list(argument), by_type, key, tensors, constants)  # such as torch.Size
    elif isinstance(argument, torch.Generator):
        raise NotPropagatableError(
            f"{func._schema.name}: a generator of the script is not there on the workers: use tensor_engine.random"
        )
    else:
        raise NotPropagatableError(f"{func._schema.name} takes {argument!r:.80}, which cannot be sent to the workers")
    return True


def note_aliases(tensors: Sequence[Tensor], key: list[Any]) -> None:
    """Add to a key which tensors are the same, or share their storage."""
    storages: dict[int, int] = {}
    for index, each in enumerate(tensors):
        storages.setdefault(id(each.remote_value.storage), index)
    if len(storages) < len(tensors):
        refs: dict[int, int] = {}
        for index, each in enumerate(tensors):
            refs.setdefault(each.remote_value.ref, index)
        key.append(tuple(storages[id(each.remote_value.storage)] for each in tensors))
        key.append(tuple(refs[each.remote_value.ref] for each in tensors))
