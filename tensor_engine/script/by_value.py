"""The script's own functions on their way to the workers: by name if workers can import them, else by value."""

from __future__ import annotations

import importlib.util
import inspect
import io
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
from torch._library.custom_ops import OPDEFS, CustomOpDef

from skipper.tensor_engine.shared.custom_operations import CustomOperation, DefinedBy, defined


def dumps(function: Any, what: str) -> bytes:
    """Pickle a function with what it uses, including operations of the script that it calls.

    Raises:
        TypeError: it cannot be pickled.
    """
    into = io.BytesIO()
    try:
        _Pickler(into).dump(function)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise TypeError(f"{what} cannot be pickled: {error}") from error
    return into.getvalue()


def is_importable(module: str | None, name: str, wanted: Sequence[object]) -> bool:
    """Whether a module that workers can also import has one of these objects under a name."""
    if module is None or module == "__main__" or "<" in name:
        return False
    found: Any = sys.modules.get(module)
    if found is None or importlib.util.find_spec(module.partition(".")[0]) is None:
        return False
    for each in name.split("."):
        found = getattr(found, each, None)
    return any(found is each for each in wanted)


def definition_of(func: Any) -> DefinedBy:
    """What defines an overload of torch in a process that has only torch: None if torch does, or it is unknown.

    Raises:
        TypeError: the script defines it, and one of its functions cannot be pickled.
    """
    made = OPDEFS.get(func._schema.name)
    if made is None:
        return None
    function = made._init_fn
    if is_importable(function.__module__, function.__qualname__, (made, function)):
        return str(function.__module__)
    return _packed(made)


def has_shapes(func: Any) -> bool:
    """Whether the script has said what a custom operation returns, if the script defines it at all."""
    made = OPDEFS.get(func._schema.name)
    return made is None or made._abstract_fn is not None


def _packed(made: CustomOpDef) -> bytes:
    arguments = made._opoverload._schema.arguments
    return dumps(
        CustomOperation(
            made._qualname,
            made._schema,
            tuple(each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write),
            tuple(getattr(made, "_tags", ())),
            made._init_fn,
            {device: _kernel(wrapped, made._init_fn) for device, wrapped in made._backend_fns.items()},
        ),
        f"the operation {made._qualname}",
    )


def _kernel(wrapped: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """The user's function inside of torch's wrapper, which turns kernels off and on."""
    below = inspect.unwrap(wrapped)
    found: Any = inspect.getclosurevars(below).nonlocals.get("fn", function)
    return found  # type: ignore[no-any-return]


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, CustomOpDef):
            return defined, (_packed(thing),)
        return super().reducer_override(thing)
