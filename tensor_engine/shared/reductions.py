"""The reductions, the dtypes that they are for, and how they reduce rows, always as torch itself does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from skipper.tensor_engine.errors import ReductionError

STACK = "stack"
"""The reduction that keeps every value: results have a new outermost dim."""

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_COMPLEX = frozenset({torch.complex64, torch.complex128})
_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_BOOL = frozenset({torch.bool})


_EXACT_PAIRS = frozenset({torch.float32, torch.float64, *_COMPLEX})
"""Dtypes for which the average of two is exactly half their sum; others are summed in a higher precision."""

Rows = torch.Tensor | Sequence[torch.Tensor]
"""The tensors of the members, in the order of their ranks: of shape (members, n), or each of shape (n,)."""


def _bitwise(function: Callable[..., torch.Tensor]) -> Callable[[Rows, torch.Tensor], None]:
    def reduce(rows: Rows, out: torch.Tensor) -> None:
        out.copy_(functools.reduce(function, rows))

    return reduce


def _stacked(rows: Rows) -> torch.Tensor:
    return rows if isinstance(rows, torch.Tensor) else torch.stack(list(rows))


def _sum(rows: Rows, out: torch.Tensor) -> None:
    if len(rows) == 2:
        torch.add(rows[0], rows[1], out=out)  # the same bits in a third of the time, in a tenth of it for bfloat16
    else:
        torch.sum(_stacked(rows), 0, dtype=out.dtype, out=out)


def _avg(rows: Rows, out: torch.Tensor) -> None:
    if len(rows) == 2 and out.dtype in _EXACT_PAIRS:
        torch.add(rows[0], rows[1], out=out).mul_(0.5)
    else:
        torch.mean(_stacked(rows), 0, out=out)


def _product(rows: Rows, out: torch.Tensor) -> None:
    torch.prod(_stacked(rows), 0, dtype=out.dtype, out=out)


def _min(rows: Rows, out: torch.Tensor) -> None:
    torch.amin(_stacked(rows), 0, out=out)


def _max(rows: Rows, out: torch.Tensor) -> None:
    torch.amax(_stacked(rows), 0, out=out)


_Reduce = Callable[[Rows, torch.Tensor], None]
_REDUCTIONS: dict[str, tuple[_Reduce, frozenset[torch.dtype], str]] = {
    "sum": (_sum, _FLOATS | _COMPLEX | _INTEGERS, "numbers; of bools take bor, or convert them first"),
    "avg": (_avg, _FLOATS | _COMPLEX, "floating and complex numbers; convert integers first"),
    "product": (_product, _FLOATS | _COMPLEX | _INTEGERS, "numbers; of bools take band, or convert them first"),
    "min": (_min, _FLOATS | _INTEGERS | _BOOL, "what has an order"),
    "max": (_max, _FLOATS | _INTEGERS | _BOOL, "what has an order"),
    "band": (_bitwise(torch.bitwise_and), _INTEGERS | _BOOL, "integers and bools"),
    "bor": (_bitwise(torch.bitwise_or), _INTEGERS | _BOOL, "integers and bools"),
    "bxor": (_bitwise(torch.bitwise_xor), _INTEGERS | _BOOL, "integers and bools"),
}


def require(reduction: str, dtype: torch.dtype) -> None:
    """Refuse a reduction that has no meaning, before anything is sent.

    Raises:
        ValueError: there is no such reduction.
        ReductionError: (a `TypeError`) it is not for that dtype.
    """
    if reduction == STACK:
        return
    known = _REDUCTIONS.get(reduction)
    if known is None:
        raise ValueError(f"there is no reduction {reduction!r}; there are {', '.join(_REDUCTIONS)} and {STACK}")
    if dtype not in known[1]:
        raise ReductionError(f"{reduction} of {dtype} tensors has no meaning here: it is for {known[2]}")


def combine(reduction: str, rows: Rows, out: torch.Tensor) -> None:
    """Reduce ``rows`` over the members into ``out``, of shape (n,), which may be one of them.

    Always in the order of the ranks, so that all members that reduce the same rows get the same bits. Sums of float16
    and bfloat16 are rounded once, at the end.
    """
    _REDUCTIONS[reduction][0](rows, out)
