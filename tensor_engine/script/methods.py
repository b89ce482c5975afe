"""What methods of `Tensor` and `Stream` do. The modules that do it need these classes, so they lie above them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Methods:
    """The functions behind them, of `issue`, `fetch`, `communicate`, `activation` and `borrow`, by their names."""

    dispatch: Callable[..., Any]
    fetch_first: Callable[..., Any]
    reduce: Callable[..., Any]
    reduce_: Callable[..., Any]
    all_to_all: Callable[..., Any]
    to_mesh: Callable[..., Any]
    slice_mesh: Callable[..., Any]
    activate_stream: Callable[..., Any]
    borrow: Callable[..., Any]


wired: Methods
"""Set by `wiring.wire`, before the import of the package has ended."""


def wire(methods: Methods) -> None:
    """Set what the methods do."""
    global wired
    wired = methods
