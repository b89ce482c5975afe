"""The functions behind the methods of `Tensor` and `Stream`. Their modules import these classes, so they register."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skipper.tensor_engine.script.streams import Borrow
    from skipper.tensor_engine.script.tensor import Tensor


@dataclass(frozen=True, slots=True)
class Methods:
    """These functions, from `issue`, `fetch`, `communicate`, `activation` and `borrow`, by name."""

    dispatch: Callable[..., Any]
    fetch_first: Callable[..., Any]
    reduce: Callable[..., Tensor]
    reduce_: Callable[..., Tensor]
    all_gather: Callable[..., Tensor]
    all_to_all: Callable[..., Tensor]
    to_mesh: Callable[..., Tensor]
    slice_mesh: Callable[..., Tensor]
    activate_stream: Callable[..., AbstractContextManager[None]]
    borrow: Callable[..., Borrow]


wired: Methods
"""Set by `wiring.wire`, before the import of the package has ended."""
