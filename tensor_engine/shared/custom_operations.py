"""Operations that the script has defined by `torch.library.custom_op`, as workers get to know them.

One of a module that workers can import is defined there when they import it. One of the script itself is sent by its
Python functions, pickled, as remote functions are.
"""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS

DefinedBy = str | bytes | None
"""What defines an operation: a module, a pickled `CustomOperation`, or torch itself."""


@dataclass(frozen=True, slots=True)
class CustomOperation:
    """An operation of the script, without what only the script needs: shapes of fake tensors, and gradients.

    Attributes:
        name: ``namespace::name``.
        schema: of its arguments and results.
        mutates: names of the arguments that it changes.
        tags: of torch's.
        function: runs it on all devices for which there is no kernel.
        kernels: run it on one type of devices; under None, on all.
    """

    name: str
    schema: str
    mutates: tuple[str, ...]
    tags: tuple[Any, ...]
    function: Callable[..., Any]
    kernels: Mapping[str | None, Callable[..., Any]]


_here: dict[str, bytes] = {}
"""By name, what has been defined in this process by `defined`."""


def define(by: DefinedBy) -> None:
    """Have an operation defined in this process."""
    if isinstance(by, str):
        importlib.import_module(by)
    elif by is not None:
        defined(by)


def defined(packed: bytes) -> Any:
    """The operation of a pickled `CustomOperation`, which is defined unless it has been, or the process has its own."""
    given: CustomOperation = pickle.loads(packed)
    known = OPDEFS.get(given.name)
    if known is not None and _here.get(given.name, packed) == packed:
        return known
    first: Sequence[str] | None = None if None in given.kernels else [each for each in given.kernels if each]
    more: dict[str, Any] = {"tags": given.tags} if given.tags else {}
    made: Any = torch.library.custom_op(
        given.name,
        given.function,
        mutates_args=given.mutates,
        device_types=first,
        schema=given.schema,
        **more,
    )
    for device, kernel in given.kernels.items():
        made.register_kernel(device)(kernel)
    _here[given.name] = packed
    return made
