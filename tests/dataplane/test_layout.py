"""Boxes compiled to rows copy what numpy's own indexing copies."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skipper.dataplane._copy import GuardedRows, copy_rows
from skipper.dataplane.layout import (
    Rows,
    as_rows,
    compile_box,
    extent,
    overlaps_itself,
    row_bytes,
    row_runs,
    single,
    stripes,
    with_keys,
)
from skipper.dataplane.regions import HOST
from skipper.dataplane.tensors import DeviceRows
from tests.sameness import assert_same

Array = np.ndarray[Any, Any]

PLACE = (HOST, 0)  # what a GPU would be given is walked in the same way


def address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


@st.composite
def views(draw: st.DrawFn, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """A view of that shape with any order of dimensions, gaps, and directions, in memory of its own."""
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.integers(1, 3)) for _ in shape]
    pads = [draw(st.integers(0, 2)) for _ in shape]
    memory = np.zeros([shape[d] * steps[d] + pads[d] for d in order], dtype)
    slices = tuple(slice(pads[d], pads[d] + shape[d] * steps[d], steps[d]) for d in order)
    view = memory[slices].transpose(np.argsort(order)) if shape else memory
    flips = tuple(slice(None, None, -1) if draw(st.booleans()) else slice(None) for _ in shape)
    return view[flips] if shape else view


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Array, Array]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=6)))
    dtype = np.dtype(draw(st.sampled_from(["u1", "i2", "f4", "f8", "c16", "V3"])))
    return draw(views(shape, dtype)), draw(views(shape, dtype))


def box_to_copy(local: Array, remote: Array, to_remote: bool) -> tuple[Array, Array, Array, Rows]:
    """Source, filled, and target, all memory of the target, and the rows from one to the other."""
    source, target = (local, remote) if to_remote else (remote, local)
    source[...] = np.frombuffer(np.random.default_rng(0).bytes(source.nbytes), source.dtype).reshape(source.shape)
    root = target if target.base is None else target.base
    rows = as_rows(
        compile_box(address(local), local.strides, address(remote), remote.strides, local.shape, local.itemsize, key=0)
    )
    return source, target, root, rows


@settings(max_examples=400, deadline=None)
@given(pairs(), st.booleans(), st.integers(1, 4))
def test_rows_copy_what_indexing_copies(pair: tuple[Array, Array], to_remote: bool, parts: int) -> None:
    source, target, root, rows = box_to_copy(*pair, to_remote)
    expected_root = root.copy()
    assert int(row_bytes(rows).sum()) == source.nbytes
    for part in stripes(rows, parts, align=1):
        copy_rows(part, to_remote)
    assert_same(target.tobytes(), source.tobytes())
    # And nothing else of the target's memory has changed.
    after = root.copy()
    target[...] = np.zeros((), target.dtype)
    assert_same(root.tobytes(), expected_root.tobytes())
    assert after.nbytes == root.nbytes


@settings(max_examples=200, deadline=None)
@given(pairs(), st.booleans())
def test_rows_as_tensors_copy_what_indexing_copies(pair: tuple[Array, Array], to_remote: bool) -> None:
    source, target, root, rows = box_to_copy(*pair, to_remote)
    before = root.copy()
    if (rows < 0).any():
        with pytest.raises(ValueError, match="negative strides"):
            DeviceRows(rows, to_remote, PLACE, [PLACE])
        return
    copying = DeviceRows(rows, to_remote, PLACE, [PLACE])
    for _ in range(2):
        copying.copy()
        assert_same(target.tobytes(), source.tobytes())
        target[...] = np.zeros((), target.dtype)
        assert_same(root.tobytes(), before.tobytes())


def test_a_contiguous_box_is_one_run_whatever_its_shape() -> None:
    array = np.zeros((3, 4, 5), np.int32)
    rows = as_rows(compile_box(0, array.strides, 1 << 20, array.strides, array.shape, 4, key=0))
    assert row_runs(rows).tolist() == [1]
    assert row_bytes(rows).tolist() == [240]


def test_a_transposed_pair_is_one_run_too() -> None:
    array = np.zeros((3, 4, 5), np.int32).transpose(2, 0, 1)
    rows = as_rows(compile_box(0, array.strides, 1 << 20, array.strides, array.shape, 4, key=0))
    assert row_runs(rows).tolist() == [1]


def test_a_column_is_one_row_of_many_runs() -> None:
    rows = as_rows(compile_box(0, (2,), 1 << 20, (2000,), (100_000,), 2, key=0))
    assert len(rows) == 1
    assert row_runs(rows).tolist() == [100_000]


def test_neighbours_are_joined_and_strangers_are_not() -> None:
    joined = [compile_box(n * 10, (1,), 1000 + n * 10, (1,), (10,), 1, key=0)[0] for n in (2, 0, 1)]
    other_key = compile_box(30, (1,), 1030, (1,), (10,), 1, key=1)[0]
    gap = compile_box(40, (1,), 2000, (1,), (10,), 1, key=0)[0]
    rows = as_rows([*joined, other_key, gap])
    assert sorted(row_bytes(rows).tolist()) == [10, 10, 30]


@given(st.integers(1, 1 << 40), st.integers(1, 16))
def test_stripes_of_one_run_cover_it_once(nbytes: int, parts: int) -> None:
    cut = stripes(single(0, 1 << 50, nbytes), parts)
    assert 1 <= len(cut) <= parts
    runs = sorted((int(row[0]), int(row[2])) for rows in cut for row in rows)
    position = 0
    for begin, length in runs:
        assert begin == position
        position += length
    assert position == nbytes


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(-40, 40)), min_size=1, max_size=3), st.integers(1, 8))
def test_overlap_is_never_overlooked(dims: list[tuple[int, int]], itemsize: int) -> None:
    shape = tuple(n for n, _ in dims)
    strides = tuple(s for _, s in dims)
    touched: list[int] = []
    for index in np.ndindex(shape):
        begin = sum(i * s for i, s in zip(index, strides, strict=True))
        touched += range(begin, begin + itemsize)
    if len(set(touched)) != len(touched):
        assert overlaps_itself(shape, strides, itemsize)
    assert (min(touched), max(touched) + 1) == extent(shape, strides, itemsize)


@pytest.mark.parametrize("view", [np.zeros((4, 6))[:, ::2], np.zeros((4, 6)).T, np.zeros((4, 6))[::-1]])
def test_what_slicing_makes_does_not_overlap(view: Array) -> None:
    assert not overlaps_itself(view.shape, view.strides, view.itemsize)


@pytest.mark.parametrize("nbytes", [1, 1023, 1024, 5000, 100_003])
@pytest.mark.parametrize("shift", [0, 1, 31])
def test_streamed_copies_bring_every_byte_and_no_more(nbytes: int, shift: int) -> None:
    source = np.frombuffer(np.random.default_rng(0).bytes(nbytes), np.uint8)
    target = np.full(nbytes + 200, 0xA5, np.uint8)
    copy_rows(single(address(target) + 64 + shift, address(source), nbytes), False, True)
    assert_same(target[64 + shift : 64 + shift + nbytes].tobytes(), source.tobytes())
    assert (target[: 64 + shift] == 0xA5).all()
    assert (target[64 + shift + nbytes :] == 0xA5).all()


def test_rows_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match="words"):
        copy_rows(np.zeros((1, 5), np.int64), False)
    words = np.zeros(1, np.uint64)
    with pytest.raises(ValueError, match="width"):
        GuardedRows(np.zeros((1, 5), np.int64), 8, words, words, False, -1)


def test_keys_are_replaced_in_rows_of_their_own() -> None:
    rows = np.concatenate([single(8 * i, 8 * i, 8) for i in range(3)])
    rows[:, 3] = [0, 1, 1]
    assert with_keys(rows, [0, 1]) is rows
    assert with_keys(rows, [2, 5])[:, 3].tolist() == [2, 5, 5]
    assert rows[:, 3].tolist() == [0, 1, 1]
