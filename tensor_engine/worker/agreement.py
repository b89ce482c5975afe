"""Values that the script has read from one rank, and assumes to be the same on all."""

from __future__ import annotations

from typing import Any

import torch


def where_it_is(result: torch.Tensor, given: torch.Tensor, expected: Any, what: str) -> torch.Tensor:
    """``result``, if a tensor has the values that the script has read.

    Raises:
        ValueError: it has other values.
    """
    if given.tolist() != expected:
        raise ValueError(f"{what} must be the same on all ranks: {given.tolist()} here, {expected} on the first one")
    return result
