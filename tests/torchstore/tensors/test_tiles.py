"""Tiles: digests that do not depend on how a tensor is cut, against hashes that are taken the plain way."""

import hashlib
from math import prod

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from skipper.torchstore.algebra.layout import Box, Layout, Replicate, Shard, StridedShard
from skipper.torchstore.tensors import tiles as tiles_module
from skipper.torchstore.tensors.cells import as_bits, cells, region
from skipper.torchstore.tensors.tiles import (
    DIGEST_NBYTES,
    TileBlock,
    TileFragment,
    TileTable,
    count_tiles,
    hashing_threads,
    joined,
    tile_shape,
)
from tests.torchstore.oracle import random_tensor


def take_tiles(
    parts: list[tuple[Box, torch.Tensor]], shape: tuple[int, ...]
) -> tuple[tuple[TileBlock, ...], tuple[TileFragment, ...]]:
    with hashing_threads() as threads:
        return tiles_module.take_tiles(parts, shape, threads)


DTYPES = [
    torch.bfloat16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.bool,
    torch.int64,
    torch.complex64,
    torch.complex128,
]
SIZES = [0, 1, 2, 3, 15, 16, 17, 33, 64, 100, 255, 256, 257, 600]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Of tensors with several tiles, on meshes of up to three axes."""
    shape = tuple(draw(st.lists(st.sampled_from(SIZES), max_size=3)))
    assume(prod(shape) <= 200_000)
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dims = st.integers(0, len(shape) - 1) if shape else st.nothing()
    placement = st.one_of(
        st.just(Replicate()), st.builds(Shard, dims), st.builds(StridedShard, dims, st.integers(1, 3))
    )
    return Layout(shape, mesh, tuple(draw(placement) for _ in mesh))


def plain_digests(tensor: torch.Tensor) -> bytes:
    """Each tile by itself."""
    shape = tuple(tensor.shape)
    if not tensor.numel():
        return b""
    found = b""
    for box in cells(Box.whole(shape), tile_shape(shape)):
        values = as_bits(region(tensor, box.offsets, box.shape)).contiguous().numpy().tobytes()
        found += hashlib.sha256(b"skipper tile\0" + values).digest()
    return found


@settings(max_examples=150, deadline=None)
@given(layouts(), st.sampled_from(DTYPES), st.booleans())
def test_any_sharding_of_any_shape_gives_the_same_digests(layout: Layout, dtype: torch.dtype, transposed: bool) -> None:
    whole = random_tensor(dtype, layout.global_shape, 7)
    if transposed and whole.ndim > 1:  # the same elements in another order in memory
        whole = as_bits(whole).transpose(0, -1).contiguous().view(dtype).transpose(0, -1)
    table = TileTable(layout.global_shape)
    for coordinate in layout.coordinates():
        pieces = layout.pieces(coordinate)
        parts = [(piece.box, region(whole, piece.box.offsets, piece.box.shape)) for piece in pieces]
        blocks, fragments = take_tiles(parts, layout.global_shape)
        assert table.show(blocks, fragments) == []
        held = sum(each.box.numel for each in (*blocks, *fragments))
        assert held == sum(piece.box.numel for piece in pieces)
    assert table.join() == []
    assert not list(table.missing())
    assert table.fragments() == ()
    assert table.digests == plain_digests(whole)
    assert len(table.digests) == count_tiles(layout.global_shape) * DIGEST_NBYTES


@pytest.mark.parametrize(
    ("shape", "tile"),
    [
        ((), ()),
        ((5,), (5,)),
        ((10_000,), (4096,)),
        ((4096, 4096), (16, 256)),
        ((4096, 64), (64, 64)),
        ((8, 1408, 2048), (1, 16, 256)),
        ((512, 512, 3, 3), (1, 256, 3, 3)),
        ((0, 7), (1, 7)),
    ],
)
def test_tiles_are_cut_where_layouts_usually_are(shape: tuple[int, ...], tile: tuple[int, ...]) -> None:
    assert tile_shape(shape) == tile


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_certified_table_names_the_tile_with_the_flipped_bit_and_no_other(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from([(40, 600), (3, 20, 257), (9000,)]))
    whole = random_tensor(torch.int64, shape, 3)
    table = TileTable(shape, plain_digests(whole))
    at = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    whole[at] ^= 1 << data.draw(st.integers(0, 62))
    cut = data.draw(st.integers(1, shape[0] - 1)) if shape[0] > 1 else 1
    wrong = []
    for start, stop in ((0, cut), (cut, shape[0])):
        box = Box((start, *(0 for _ in shape[1:])), (stop - start, *shape[1:]))
        wrong += table.show(*take_tiles([(box, whole[start:stop])], shape))
    wrong += table.join()
    (found,) = wrong
    assert all(start <= index < start + size for start, index, size in zip(found.offsets, at, found.shape, strict=True))
    assert int(table.shown.sum()) == count_tiles(shape) - 1


def test_a_tile_of_which_a_part_is_missing_stays_open() -> None:
    shape = (16, 256)
    whole = random_tensor(torch.bfloat16, shape, 1)
    table = TileTable(shape)
    blocks, fragments = take_tiles([(Box((0, 0), (9, 256)), whole[:9])], shape)
    assert blocks == ()
    table.show(blocks, fragments)
    assert table.join() == []
    assert table.fragments() == fragments
    assert list(table.missing()) == [Box((0, 0), shape)]


def test_parts_that_contradict_each_other_make_no_tile() -> None:
    box, half = Box((0,), (4,)), Box((0,), (3,))
    same = [TileFragment(half, b"abc"), TileFragment(Box((2,), (2,)), b"cd")]
    assert joined(box, same) == b"abcd"
    assert joined(box, [TileFragment(half, b"abx"), same[1]]) == b""
    assert joined(box, same[:1]) is None
    assert joined(box, [same[0], same[0]]) is None  # enough bytes, and not all of the elements
    table = TileTable((4,))
    table.show((), [TileFragment(half, b"abx"), same[1]])
    assert table.join() == [box]


def test_replicas_that_differ_are_found() -> None:
    table = TileTable((4,))
    box = Box((0,), (4,))
    assert table.show([TileBlock(box, bytes(DIGEST_NBYTES))], ()) == []
    assert table.show([TileBlock(box, b"\1" * DIGEST_NBYTES)], ()) == [box]


def test_a_large_tensor_is_hashed_by_several_threads_to_the_same_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles_module, "_STRIP_NBYTES", 1 << 14)
    whole = random_tensor(torch.bfloat16, (3, 100, 700), 5)
    blocks, _ = take_tiles([(Box.whole((3, 100, 700)), whole)], (3, 100, 700))
    assert b"".join(block.digests for block in blocks) == plain_digests(whole)
