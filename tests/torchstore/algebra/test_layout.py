"""The box algebra against DTensor's own chunking, element by element.

What is real here: ``Shard._split_tensor`` and ``_StridedShard._split_tensor`` are the functions by which
DTensor cuts tensors in ``distribute_tensor``, and ``_compute_local_shape_and_global_offset`` is the one by
which it reports shapes; both run on real tensors whose elements are their own global indices. No process
group is needed for either.
"""

from math import prod

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard as TorchStridedShard

from skipper.torchstore.algebra.layout import (
    Box,
    Layout,
    Piece,
    Replicate,
    Shard,
    StridedShard,
    contiguous_strides,
    uncovered,
)
from skipper.torchstore.algebra.matching import HeldBoxes, match
from tests.torchstore.oracle import as_this_torch_cuts, cuts_what_is_strided_twice, shard_tensor

EXAMPLES = settings(max_examples=400, deadline=None)


def placements(ndim: int) -> st.SearchStrategy[Replicate | Shard | StridedShard]:
    dims = st.integers(0, ndim - 1) if ndim else st.nothing()
    return st.one_of(
        st.just(Replicate()),
        st.builds(Shard, dims),
        st.builds(StridedShard, dims, st.integers(1, 4)),
    )


@st.composite
def layouts(draw: st.DrawFn, global_shape: tuple[int, ...] | None = None) -> Layout:
    if global_shape is None:
        global_shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    mesh_shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    over = tuple(draw(placements(len(global_shape))) for _ in mesh_shape)
    return as_this_torch_cuts(Layout(global_shape, mesh_shape, over))


@st.composite
def layout_pairs(draw: st.DrawFn) -> tuple[Layout, Layout]:
    source = draw(layouts())
    return source, draw(layouts(global_shape=source.global_shape))


def global_indices(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(prod(shape)).reshape(shape)


def shard_as_dtensor_does(layout: Layout, coordinate: tuple[int, ...]) -> torch.Tensor:
    return shard_tensor(global_indices(layout.global_shape), layout, coordinate)


def gather(layout: Layout, coordinate: tuple[int, ...]) -> torch.Tensor:
    """The local tensor by our pieces."""
    whole = global_indices(layout.global_shape)
    local = torch.full(layout.local_shape(coordinate), -1)
    for piece in layout.pieces(coordinate):
        local[region(piece.local, piece.box.shape)] = whole[region(piece.box.offsets, piece.box.shape)]
    return local


def region(offsets: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(offsets, shape, strict=True))


@EXAMPLES
@given(layouts())
def test_pieces_hold_what_dtensor_puts_on_every_rank(layout: Layout) -> None:
    for coordinate in layout.coordinates():
        assert torch.equal(gather(layout, coordinate), shard_as_dtensor_does(layout, coordinate))


@EXAMPLES
@given(layouts())
def test_local_shape_and_first_offset_are_those_that_dtensor_reports(layout: Layout) -> None:
    # 2.8 reports something else for strided shards than it makes.
    assume(cuts_what_is_strided_twice() or not any(isinstance(p, StridedShard) for p in layout.placements))
    theirs = [
        TorchStridedShard(p.dim, split_factor=p.split_factor)
        if isinstance(p, StridedShard)
        else TorchShard(p.dim)
        if isinstance(p, Shard)
        else torch.distributed.tensor.Replicate()
        for p in layout.placements
    ]
    for coordinate in layout.coordinates():
        shape, offset = _compute_local_shape_and_global_offset(
            layout.global_shape, layout.mesh_shape, list(coordinate), theirs
        )
        assert layout.local_shape(coordinate) == shape
        pieces = layout.pieces(coordinate)
        if pieces:
            assert pieces[0].box.offsets == offset
        else:
            assert prod(shape) == 0


@EXAMPLES
@given(layouts())
def test_all_ranks_together_cover_the_tensor_and_replicas_only_repeat_it(layout: Layout) -> None:
    boxes = frozenset(piece.box for at in layout.coordinates() for piece in layout.pieces(at))
    assert uncovered(layout.global_shape, boxes) == ()
    copies = prod(
        size
        for size, placement in zip(layout.mesh_shape, layout.placements, strict=True)
        if isinstance(placement, Replicate)
    )
    held = sum(piece.box.numel for at in layout.coordinates() for piece in layout.pieces(at))
    assert held == copies * prod(layout.global_shape)


@EXAMPLES
@given(layout_pairs(), st.integers(0, 5))
def test_a_match_moves_every_element_of_the_target_exactly_once(pair: tuple[Layout, Layout], preference: int) -> None:
    source, target = pair
    sources = HeldBoxes.of([source.pieces(at) for at in source.coordinates()])
    held = [shard_as_dtensor_does(source, at) for at in source.coordinates()]
    for coordinate in target.coordinates():
        expected = shard_as_dtensor_does(target, coordinate)
        received = torch.full_like(expected, -1)
        written = torch.zeros_like(expected)
        found = match(sources, target.pieces(coordinate), preference=preference)
        assert found.holes == ()
        for transfer in found.transfers:
            here = region(transfer.target_local, transfer.shape)
            received[here] = held[transfer.source][region(transfer.source_local, transfer.shape)]
            written[here] += 1
        assert torch.equal(received, expected)
        assert bool((written == 1).all())


@EXAMPLES
@given(layouts(), st.data())
def test_a_missing_rank_leaves_exactly_the_hole_that_only_it_could_fill(layout: Layout, data: st.DataObject) -> None:
    coordinates = list(layout.coordinates())
    lost = data.draw(st.sampled_from(coordinates))
    boxes = frozenset(p.box for at in coordinates if at != lost for p in layout.pieces(at))
    covered = torch.zeros(layout.global_shape, dtype=torch.bool)
    for box in boxes:
        covered[region(box.offsets, box.shape)] = True
    holes = torch.zeros(layout.global_shape, dtype=torch.int)
    for box in uncovered(layout.global_shape, boxes):
        holes[region(box.offsets, box.shape)] += 1
    assert torch.equal(holes, (~covered).int())


def test_a_scalar_is_one_piece_of_one_element() -> None:
    assert Layout(()).pieces(()) == (Piece(Box((), ()), ()),)
    assert Box((), ()).numel == 1


def test_a_tensor_without_elements_has_no_pieces_and_is_covered() -> None:
    assert Layout((3, 0)).pieces(()) == ()
    assert uncovered((3, 0), frozenset()) == ()


def test_sharded_axes_leave_out_replicas_and_axes_of_one() -> None:
    layout = Layout((8, 8), (2, 1, 3), (Replicate(), Shard(0), Shard(1)))
    assert layout.sharded_axes() == (2,)


@pytest.mark.parametrize(
    ("shape", "mesh", "placed"),
    [
        ((4,), (2,), ()),
        ((4,), (2,), (Shard(1),)),
        ((4,), (0,), (Shard(0),)),
        ((-1,), (2,), (Shard(0),)),
        ((4,), (2,), (StridedShard(0, 0),)),
    ],
)
def test_impossible_layouts_are_refused(
    shape: tuple[int, ...], mesh: tuple[int, ...], placed: tuple[Shard | StridedShard, ...]
) -> None:
    with pytest.raises(ValueError, match=r"placements|dims|sizes|split factor"):
        Layout(shape, mesh, placed)


@pytest.mark.parametrize("coordinate", [(2,), (-1,), (), (0, 0)])
def test_a_coordinate_outside_the_mesh_is_refused(coordinate: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="not a coordinate"):
        Layout((4,), (2,), (Shard(0),)).pieces(coordinate)


def test_contiguous_strides_are_those_of_torch() -> None:
    for shape in [(), (3,), (2, 3, 4), (2, 1, 5)]:
        assert contiguous_strides(shape) == torch.empty(shape).stride()
