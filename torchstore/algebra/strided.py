"""Strided sets of addresses and their intersections: how views of views are traced back.

A tensor over a storage is the set of addresses ``offset + sum(index * stride)``. Elements that were written through one
view of a storage and are read through another (after a `view`, a `narrow`, a transpose) are in the intersection of both
sets. If the strides of both divide one another, addresses can be written as digits of one mixed-radix number; each set
becomes a few boxes of digits, and boxes are intersected dim by dim. No function looks at single elements: the cost
depends on the number of dims, not on the size of the tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

from skipper.torchstore.algebra.layout import Ints, contiguous_strides


class NotStridedError(ValueError):
    """The intersection of two views cannot be expressed by a few strided sets."""


@dataclass(frozen=True, slots=True)
class Strided:
    """The addresses ``offset + sum(index * stride)``, in elements, for every index below ``shape``."""

    offset: int
    shape: Ints
    strides: Ints

    @staticmethod
    def contiguous(shape: Ints) -> Strided:
        """All elements of a tensor of this shape, row by row."""
        return Strided(0, shape, contiguous_strides(shape))

    @property
    def numel(self) -> int:
        """The number of indices."""
        return prod(self.shape)

    @property
    def last(self) -> int:
        """The highest address of a set that is not empty."""
        return self.offset + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))


@dataclass(frozen=True, slots=True)
class Pair:
    """Two sets of one shape: elements with the same index in both belong together."""

    at: Strided
    of: Strided


@dataclass(frozen=True, slots=True)
class Common:
    """The intersection of a view and a region.

    Attributes:
        found: For each part, the counterparts of both, as a pair of the view's and the region's.
        rest: The rest of the view.
    """

    found: tuple[Pair, ...]
    rest: tuple[Pair, ...]


def meet(view: Pair, region: Pair) -> Common:
    """Cut a view by a region of the same storage.

    Args:
        view: Its addresses (``at``; a stride of 0 repeats elements), and their counterparts.
        region: Its addresses and their counterparts; no two of its indices have the same address.

    Raises:
        NotStridedError: The strides do not divide one another, or one set wraps around the rows of the other.
    """
    if not view.at.numel:
        return Common((), ())
    if not region.at.numel or view.at.last < region.at.offset or region.at.last < view.at.offset:
        return Common((), (view,))
    repeated = [dim for dim, stride in enumerate(view.at.strides) if not stride and view.at.shape[dim] > 1]
    plain = _without(view, repeated)
    radices = sorted({stride for pair in (plain, region) for _, stride, _ in _dims(pair)} or {1}, reverse=True)
    if any(large % small for large, small in pairwise(radices)):
        raise NotStridedError(f"strides {view.at.strides} and {region.at.strides} do not divide one another")
    if (plain.at.offset - region.at.offset) % radices[-1]:
        return Common((), (view,))
    rest, found = list(_boxes(plain, radices)), []
    for theirs in _boxes(region, radices):
        left: list[_Digits] = []
        for mine in rest:
            low, high = tuple(map(max, mine.low, theirs.low)), tuple(map(min, mine.high, theirs.high))
            if any(start >= stop for start, stop in zip(low, high, strict=True)):
                left.append(mine)
                continue
            found.append(Pair(mine.counterpart(low, high), theirs.counterpart(low, high)))
            left += mine.around(low, high)
        rest = left
    again = [(view.at.shape[dim], view.of.strides[dim]) for dim in repeated]
    once = [(size, 0) for size, _ in again]
    addresses = _Digits((0,) * len(radices), (), view.at.offset % radices[-1], tuple(radices))
    return Common(
        tuple(Pair(_with(pair.at, again), _with(pair.of, once)) for pair in found),
        tuple(
            Pair(
                _with(addresses.counterpart(box.low, box.high), once),
                _with(box.counterpart(box.low, box.high), again),
            )
            for box in rest
        ),
    )


def merged(pair: Pair, within: tuple[Sequence[int], Sequence[int]] = ((), ())) -> Pair:
    """The same pair with as few dims as possible, those with the largest strides of ``at`` first.

    Args:
        pair: Any pair.
        within: For each side, strides across which dims are not merged, such as those of a tensor's dims, which stay
        separate.
    """
    if not pair.at.numel:
        return Pair(*(Strided(side.offset, (0,), (1,)) for side in (pair.at, pair.of)))
    dims = sorted(
        (
            (at, of, size)
            for size, at, of in zip(pair.at.shape, pair.at.strides, pair.of.strides, strict=True)
            if size > 1
        ),
        key=lambda dim: (-dim[0], -dim[1]),
    )
    kept: list[tuple[int, int, int]] = []
    for at, of, size in dims:
        if kept:
            outer_at, outer_of, count = kept[-1]
            fits = outer_at == at * size and outer_of == of * size
            apart = any(
                inner < border <= outer
                for borders, inner, outer in zip(within, (at, of), (outer_at, outer_of), strict=True)
                for border in borders
            )
            if fits and not apart:
                kept[-1] = (at, of, count * size)
                continue
        kept.append((at, of, size))
    shape = tuple(size for _, _, size in kept)
    return Pair(
        Strided(pair.at.offset, shape, tuple(at for at, _, _ in kept)),
        Strided(pair.of.offset, shape, tuple(of for _, of, _ in kept)),
    )


@dataclass(frozen=True, slots=True)
class _Digits:
    """A box of digits, and the counterpart of each: ``base + sum((digit - low) * weight)``."""

    low: Ints
    high: Ints
    base: int
    weights: Ints

    def counterpart(self, low: Ints, high: Ints) -> Strided:
        """The counterparts of a box within this one; only dims with more than one digit are kept."""
        kept = [level for level in range(len(low)) if high[level] - low[level] > 1]
        return Strided(
            self._base(low),
            tuple(high[level] - low[level] for level in kept),
            tuple(self.weights[level] for level in kept),
        )

    def around(self, low: Ints, high: Ints) -> Iterator[_Digits]:
        """The rest of this box outside of a box within it."""
        start, stop = list(self.low), list(self.high)
        for level in range(len(start)):
            for begin, end in ((start[level], low[level]), (high[level], stop[level])):
                if begin < end:
                    first = (*start[:level], begin, *start[level + 1 :])
                    past = (*stop[:level], end, *stop[level + 1 :])
                    yield _Digits(first, past, self._base(first), self.weights)
            start[level], stop[level] = low[level], high[level]

    def _base(self, low: Ints) -> int:
        return self.base + sum((to - at) * weight for to, at, weight in zip(low, self.low, self.weights, strict=True))


def _boxes(pair: Pair, radices: Sequence[int]) -> Iterator[_Digits]:
    """The addresses of a pair as boxes of digits, with their counterparts.

    Raises:
        NotStridedError: Two dims share digits, or one carries into the next.
    """
    place = {radix: level for level, radix in enumerate(radices)}
    dims = _dims(pair)  # the largest stride first
    digits = [pair.at.offset // radices[0]]
    digits += [pair.at.offset % above // radix for above, radix in pairwise(radices)]
    weights = [0] * len(radices)
    choices: list[list[tuple[int, Ints, Ints, int]]] = []  # for each dim: first level, low, high, first index
    above = -1  # the level of the previous dim, into which this one must not carry
    for size, stride, weight in dims:
        level = place[stride]
        if level == above:
            raise NotStridedError(f"two dims of one stride: {pair.at}")
        top = above + 1
        for inner in range(top, level + 1):
            weights[inner] = radices[inner] // stride * weight
        units = [radices[inner] // stride for inner in range(top, level + 1)]
        start = sum(digits[inner] * unit for inner, unit in zip(range(top, level + 1), units, strict=True))
        if top and start + size > radices[top - 1] // stride:
            raise NotStridedError(f"a dim carries into the next one: {pair.at}")
        choices.append([(top, low, high, first - start) for first, low, high in _split(start, start + size, units)])
        above = level
    yield from _products(choices, dims, digits, weights, pair.of.offset)


def _products(
    choices: Sequence[Sequence[tuple[int, Ints, Ints, int]]],
    dims: Sequence[tuple[int, int, int]],
    digits: Sequence[int],
    weights: Sequence[int],
    base: int,
) -> Iterator[_Digits]:
    """Every combination of the ranges of each dim; levels without a dim have one digit."""
    for ranges in product(*choices):
        low, high = list(digits), [digit + 1 for digit in digits]
        here = base
        for (top, start, stop, index), (_, _, weight) in zip(ranges, dims, strict=True):
            low[top : top + len(start)] = start
            high[top : top + len(stop)] = stop
            here += index * weight
        yield _Digits(tuple(low), tuple(high), here, tuple(weights))


def _split(start: int, stop: int, units: Sequence[int]) -> Iterator[tuple[int, Ints, Ints]]:
    """A range of numbers as boxes of their digits, with these units (the last is 1).

    Yields:
        The first number, the first digits of the box, and the digits after its last ones.
    """
    unit, *lower = units
    if not lower:
        yield start, (start,), (stop,)
        return
    whole = tuple(above // below for above, below in zip(units, lower, strict=False))
    (first, head), (past, tail) = divmod(start, unit), divmod(stop, unit)
    if first == past:
        yield from _below(first, unit, head, tail, lower)
        return
    if head:
        yield from _below(first, unit, head, unit, lower)
        first += 1
    if first < past:
        yield first * unit, (first, *(0 for _ in lower)), (past, *whole)
    if tail:
        yield from _below(past, unit, 0, tail, lower)


def _below(digit: int, unit: int, start: int, stop: int, lower: Sequence[int]) -> Iterator[tuple[int, Ints, Ints]]:
    for first, low, high in _split(start, stop, lower):
        yield digit * unit + first, (digit, *low), (digit + 1, *high)


def _dims(pair: Pair) -> list[tuple[int, int, int]]:
    """(size, stride, counterpart's stride) of the dims with more than one index, largest stride first."""
    dims = zip(pair.at.shape, pair.at.strides, pair.of.strides, strict=True)
    return sorted((dim for dim in dims if dim[0] > 1), key=lambda dim: -dim[1])


def _without(pair: Pair, dims: Sequence[int]) -> Pair:
    kept = [dim for dim in range(len(pair.at.shape)) if dim not in dims]
    at, of = (
        Strided(each.offset, tuple(each.shape[dim] for dim in kept), tuple(each.strides[dim] for dim in kept))
        for each in (pair.at, pair.of)
    )
    return Pair(at, of)


def _with(strided: Strided, dims: Sequence[tuple[int, int]]) -> Strided:
    """The same with further dims, of these sizes and strides."""
    sizes, strides = tuple(size for size, _ in dims), tuple(stride for _, stride in dims)
    return Strided(strided.offset, strided.shape + sizes, strided.strides + strides)
