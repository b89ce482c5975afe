"""The grid of a tensor, its sums and its comparisons, against the plain way of taking them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skipper.torchstore.algebra.layout import Box
from skipper.torchstore.tensors.cells import (
    cell_shape,
    cell_sums,
    cells,
    cells_differ,
    grid_shape,
    grid_slice,
    region,
    whole_cells,
)
from tests.torchstore.oracle import random_tensor

DTYPES = [
    torch.bfloat16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.bool,
    torch.int64,
    torch.complex64,
    torch.complex128,
]


def plain_sums(block: torch.Tensor, box: Box, cell: tuple[int, ...]) -> list[int]:
    """Each cell by itself: rows of bytes, filled up with zeros to words, added modulo 2**64."""
    sums = []
    for part in cells(box, cell):
        values = region(block, part.relative_to(box.offsets), part.shape)
        rows = values.reshape(-1, part.shape[-1]) if part.shape else values.reshape(1, 1)
        total = 0
        for row in rows:
            raw = row.clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes()
            raw += bytes(-len(raw) % 8)
            total += sum(int.from_bytes(raw[at : at + 8], "little") for at in range(0, len(raw), 8))
        sums.append((total + 2**63) % 2**64 - 2**63)
    return sums


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    """A tensor's shape and a box of it that is not empty."""
    shape = tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))
    offsets, sizes = [], []
    for size in shape:
        start = draw(st.integers(0, size - 1))
        offsets.append(start)
        sizes.append(draw(st.integers(1, size - start)))
    return shape, Box(tuple(offsets), tuple(sizes))


@settings(max_examples=60, deadline=None)
@given(boxes(), st.sampled_from(DTYPES), st.sampled_from([8, 16, 64]), st.booleans())
def test_the_sum_of_each_cell_is_that_of_its_words(
    case: tuple[tuple[int, ...], Box], dtype: torch.dtype, limit: int, transposed: bool
) -> None:
    shape, box = case
    cell = cell_shape(shape, limit)
    block = random_tensor(dtype, box.shape, 7)
    if transposed:  # the same elements in another order in memory
        block = block.transpose(0, -1).contiguous().transpose(0, -1)
    sums = cell_sums(block, box.offsets, cell)
    assert tuple(sums.shape) == grid_shape(box, cell)
    assert sums.flatten().tolist() == plain_sums(block, box, cell)


@settings(max_examples=60, deadline=None)
@given(boxes(), st.sampled_from(DTYPES), st.sampled_from([8, 16, 64]), st.data())
def test_just_the_cells_with_another_bit_differ(
    case: tuple[tuple[int, ...], Box], dtype: torch.dtype, limit: int, data: st.DataObject
) -> None:
    shape, box = case
    cell = cell_shape(shape, limit)
    left = random_tensor(dtype, box.shape, 7)
    right = left.clone()
    assert not bool(cells_differ(left, right, box.offsets, cell).any())
    at = data.draw(st.integers(0, left.numel() - 1))
    raw = right.flatten().view(torch.uint8)
    raw[at * dtype.itemsize] ^= 1
    changed = raw.view(dtype).reshape(box.shape)
    differing = cells_differ(left, changed, box.offsets, cell).flatten().tolist()
    where = torch.zeros(box.shape, dtype=torch.bool)
    where.view(-1)[at] = True
    assert differing == [bool(region(where, c.relative_to(box.offsets), c.shape).any()) for c in cells(box, cell)]


@settings(max_examples=100, deadline=None)
@given(boxes(), st.integers(1, 64), st.data())
def test_a_part_of_a_box_lies_between_its_whole_cells_and_those_it_touches(
    case: tuple[tuple[int, ...], Box], limit: int, data: st.DataObject
) -> None:
    shape, box = case
    cell = cell_shape(shape, limit)
    offsets = tuple(data.draw(st.integers(low, low + n - 1)) for low, n in zip(box.offsets, box.shape, strict=True))
    sizes = tuple(
        data.draw(st.integers(1, low + n - at)) for at, low, n in zip(offsets, box.offsets, box.shape, strict=True)
    )
    part = Box(offsets, sizes)
    inner, outer = whole_cells(part, box, cell)
    every = list(cells(box, cell))
    touched = {c for c in every if c.intersect(part)}
    within = {c for c in every if c.intersect(part) == c}
    assert {c for c in every if outer.intersect(c)} == touched
    assert (set(cells(inner, cell)) if inner else set()) == within
    numbers = torch.arange(len(every)).reshape(grid_shape(box, cell))
    assert {every[n] for n in numbers[grid_slice(outer, box, cell)].flatten().tolist()} == touched


def test_a_cell_of_weights_has_some_thousand_elements() -> None:
    assert cell_shape((4096, 11008)) == (64, 64)
    assert cell_shape((896,)) == (896,)
    assert cell_shape((10**6,)) == (4096,)
    assert cell_shape((256, 128, 3, 3)) == (7, 64, 3, 3)
    assert cell_shape(()) == ()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_without_dims_is_one_cell(dtype: torch.dtype) -> None:
    scalar = random_tensor(dtype, (), 3)
    assert cell_sums(scalar, (), ()).item() == plain_sums(scalar, Box((), ()), ())[0]
    assert not bool(cells_differ(scalar, scalar.clone(), (), ()))
