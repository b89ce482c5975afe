"""Which source fills which block; that the elements are the right ones is tested against DTensor in test_layout."""

from skipper.torchstore.algebra.layout import Box, Layout, Piece, Replicate, Shard
from skipper.torchstore.algebra.manifest import Manifest, MeshPosition, TensorItem
from skipper.torchstore.algebra.matching import HeldBoxes, SourceTensors, match


def held_by_all(layout: Layout) -> HeldBoxes:
    return HeldBoxes.of([layout.pieces(at) for at in layout.coordinates()])


def item(layout: Layout, rank: int) -> TensorItem:
    return TensorItem("torch.uint8", layout.global_shape, layout.pieces((rank,)), 0, 0, (1,), 1)


def manifest(rank: int, size: int, **layouts: Layout) -> Manifest:
    items = {name: item(layout, rank) for name, layout in layouts.items()}
    return Manifest.of("state_dict", MeshPosition((rank,), (size,), (0,)), items, (), {})


def test_replicas_are_spread_by_preference() -> None:
    held, target = held_by_all(Layout((6,), (3,), (Replicate(),))), Layout((6,)).pieces(())
    assert {match(held, target, preference=p).transfers[0].source for p in range(3)} == {0, 1, 2}
    assert held.choices == 3


def test_the_preference_says_nothing_where_no_box_has_two_holders() -> None:
    held, target = held_by_all(Layout((6,), (3,), (Shard(0),))), Layout((6,)).pieces(())
    assert held.choices == 1
    assert len({match(held, target, preference=p) for p in range(7)}) == 1


def test_answers_repeat_after_as_many_preferences_as_there_are_choices() -> None:
    halves = [Layout((6,), (2,), (Shard(0),)).pieces((at,)) for at in (0, 1, 1)]  # of one half two holders
    thirds = [Layout((6,), (3,), (Shard(0),)).pieces((2,))] * 3
    held, target = HeldBoxes.of([*halves, *thirds]), Layout((6,)).pieces(())
    assert held.choices == 6
    for preference in range(6):
        assert match(held, target, preference=preference) == match(held, target, preference=preference + 6)


def test_a_hole_is_named_by_its_box() -> None:
    layout = Layout((4, 6), (2,), (Shard(1),))
    found = match(HeldBoxes.of([layout.pieces((0,))]), Layout((4, 6)).pieces(()))
    assert found.holes == (Box((0, 3), (4, 3)),)


def test_a_reader_finds_only_the_holders_of_what_it_wants() -> None:
    cut, other = Layout((6,), (2,), (Shard(0),)), Layout((4,), (2,), (Shard(0),))
    manifests = [manifest(0, 2, mine=cut), manifest(1, 2, mine=cut, yours=other)]
    tensors = SourceTensors(manifests, ["mine", "nobody's"])
    assert [index for index, _ in tensors.holders("mine")] == [0, 1]
    assert tensors.holders("nobody's") == []
    whole = Layout((6,)).pieces(())
    assert [transfer.source for transfer in tensors.find("mine", whole, 0).transfers] == [0, 1]
    assert tensors.find("nobody's", whole, 0).holes == (Box((0,), (6,)),)


def test_what_tensors_of_one_layout_have_in_common_is_worked_out_once() -> None:
    cut = Layout((64,), (16,), (Shard(0),))
    names = [f"layers.{number}" for number in range(40)]
    manifests = [manifest(rank, 16, **dict.fromkeys(names, cut)) for rank in range(16)]
    tensors, target = SourceTensors(manifests, names), Layout((64,)).pieces(())
    found = {id(tensors.find(name, target, position)) for position, name in enumerate(names)}
    assert len(found) == 1


def test_tensors_of_one_layout_on_different_ranks_are_told_apart() -> None:
    whole = (Piece(Box((0,), (4,)), (0,)),)
    everywhere = TensorItem("torch.uint8", (4,), whole, 0, 0, (1,), 1)
    part = MeshPosition()
    manifests = [Manifest.of("state_dict", part, {name: everywhere}, (), {}) for name in ("first", "second")]
    tensors = SourceTensors(manifests, ["first", "second"])
    for index, name in enumerate(("first", "second")):
        (transfer,) = tensors.find(name, whole, 0).transfers
        assert tensors.holders(name)[transfer.source][0] == index
