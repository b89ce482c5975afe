"""Operations that the script has defined by `torch.library.custom_op`, and how workers get them.

If an operation is in a module that workers can import, importing it defines the operation there. If it is in the
script itself, its Python functions are sent pickled, like remote functions.
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
        schema: schema of its arguments and results.
        mutates: names of the arguments that it changes.
        tags: tags of torch.
        function: runs it on all devices that have no kernel.
        kernels: run it on one type of devices; under None, on all.
    """

    name: str
    schema: str
    mutates: tuple[str, ...]
    tags: tuple[Any, ...]
    function: Callable[..., Any]
    kernels: Mapping[str | None, Callable[..., Any]]


_here: dict[str, bytes] = {}
"""The operations that `defined` has defined in this process, by name."""


def define(by: DefinedBy) -> None:
    """Define an operation in this process."""
    if isinstance(by, str):
        importlib.import_module(by)
    elif by is not None:
        defined(by)


def defined(packed: bytes) -> Any:
    """The operation of a pickled `CustomOperation`; defines it unless the process has it already, or its own."""
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
