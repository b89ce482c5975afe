"""Destinations that share memory: refused unless they are tied on both sides."""

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skipper import torchstore as ts
from skipper.torchstore.tensors.overlap import check_distinct, overlaps_itself

SIZES = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 7)), max_size=3)


def offsets(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    return [sum(i * s for i, s in zip(at, strides, strict=True)) for at in product(*map(range, shape))]


@given(SIZES)
def test_a_tensor_overlaps_itself_where_two_elements_have_one_place(dims: list[tuple[int, int]]) -> None:
    shape, strides = [size for size, _ in dims], [stride for _, stride in dims]
    places = offsets(shape, strides)
    assert overlaps_itself(shape, strides) == (len(set(places)) < len(places))


@given(SIZES, SIZES, st.integers(0, 12), st.sampled_from([torch.int8, torch.int32]))
def test_two_tensors_are_refused_exactly_where_they_have_a_byte_in_common(
    left: list[tuple[int, int]], right: list[tuple[int, int]], start: int, dtype: torch.dtype
) -> None:
    memory = torch.zeros(12 + 3 * 3 * 7 + 1, dtype=dtype)  # as far as one of them may reach
    tensors = [
        memory.as_strided([size for size, _ in dims], [stride for _, stride in dims], begin)
        for dims, begin in ((left, 0), (right, start))
    ]
    common = set(offsets(*zip(*left, strict=True)) if left else [0]) & {
        start + place for place in (offsets(*zip(*right, strict=True)) if right else [0])
    }
    with pytest.raises(ts.DestinationOverlapError) if common else nullcontext() as raised:
        check_distinct("k", list(zip("ab", tensors, strict=True)), lambda index: index)
    if raised is not None:
        assert sorted(raised.value.names) == ["a", "b"]


def test_only_those_who_share_memory_are_asked_for_their_source() -> None:
    matrix, asked = torch.zeros(8, 100), []
    entries = [*((f"column {at}", matrix[:, at : at + 1]) for at in range(99)), ("other", torch.zeros(3))]
    check_distinct("k", entries, asked.append)
    assert not asked
    check_distinct("k", [*entries, ("tied", matrix[:, 4:5])], lambda index: asked.append(index) or "the same")
    assert set(asked) == {4, 100}


with_store = pytest.mark.usefixtures("store")


@with_store
@pytest.mark.parametrize("rows", [4, 4000])
async def test_two_stored_tensors_are_not_read_into_one(rows: int) -> None:
    await ts.put_state_dict({"a": torch.zeros(rows, 4), "b": torch.ones(rows, 4)}, "m")
    await ts.put_batch({"a": torch.zeros(rows, 4), "b": torch.ones(rows, 4)})
    mine = torch.full((rows + 1, 4), 7.0)
    for into in ({"a": mine[1:], "b": mine[1:]}, {"a": mine[1:], "b": mine[:-1]}):
        with pytest.raises(ts.DestinationOverlapError, match=r"'(a|b)' and '(a|b)'.*the same memory"):
            await ts.get_state_dict("m", into)
        with pytest.raises(ts.DestinationOverlapError, match=r"'(a|b)' and '(a|b)'.*the same memory"):
            await ts.get_batch(into)
    assert (mine == 7).all()


@with_store
async def test_columns_of_one_matrix_are_destinations_of_their_own() -> None:
    await ts.put_state_dict({"q": torch.zeros(60, 40), "k": torch.ones(60, 40)}, "m")
    fused = torch.full((60, 80), 7.0)
    await ts.get_state_dict("m", {"q": fused[:, :40], "k": fused[:, 40:]})
    assert (fused[:, :40] == 0).all()
    assert (fused[:, 40:] == 1).all()


@with_store
@pytest.mark.parametrize("options", [{}, {"mode": "direct"}, {"transfer_dtype": torch.bfloat16}, {"checksum": True}])
async def test_tied_weights_are_read_into_tied_weights_and_into_others(options: dict[str, object]) -> None:
    weight = torch.randn(300, 40, dtype=options.get("transfer_dtype", torch.float32))  # type: ignore[arg-type]
    await ts.put_state_dict({"embed": weight, "head": weight, "flat": weight.view(-1)}, "m", **options)  # type: ignore[arg-type]
    mine, other = torch.zeros_like(weight), torch.zeros_like(weight)
    for _ in range(2):
        await ts.get_state_dict("m", {"embed": mine, "head": mine, "flat": mine.view(-1)})
        await ts.get_state_dict("m", {"embed": mine, "head": other, "flat": torch.zeros_like(weight.view(-1))})
        assert torch.equal(mine, weight)
        assert torch.equal(other, weight)
    fresh = await ts.get_state_dict("m")
    assert torch.equal(fresh["embed"], weight)
    assert torch.equal(fresh["head"], weight)
    await ts.get_batch({"m/embed": mine.zero_(), "m/head": mine})
    assert torch.equal(mine, weight)


@with_store
async def test_one_stored_tensor_may_have_two_names_in_one_memory() -> None:
    await ts.put_state_dict({"embed": torch.ones(300, 40)}, "m")
    mine = torch.zeros(300, 40)
    await ts.get_state_dict("m", {"embed": mine, "head": mine}, names=lambda name: "embed")
    assert (mine == 1).all()


@with_store
async def test_quantized_tensors_are_not_read_into_one() -> None:
    await ts.put_state_dict({"a": torch.zeros(256, 128), "b": torch.ones(256, 128)}, "m", transfer_dtype=ts.BlockFP8())
    mine = torch.full((256, 128), 7.0)
    with pytest.raises(ts.DestinationOverlapError):
        await ts.get_state_dict("m", {"a": mine, "b": mine})
    assert (mine == 7).all()


@with_store
async def test_equal_small_values_may_be_read_into_one_tensor() -> None:
    await ts.put_batch({"a": torch.ones(3), "b": torch.ones(3)})
    mine = torch.zeros(3)
    await ts.get_batch({"a": mine, "b": mine})
    assert (mine == 1).all()


@with_store
@pytest.mark.parametrize("rows", [4, 4000])
async def test_a_tensor_that_overlaps_itself_is_no_destination(rows: int) -> None:
    await ts.put("w", torch.ones(rows, 4))
    for tensor in (torch.zeros(1, 4).expand(rows, 4), torch.zeros(rows + 4).unfold(0, 4, 1)[:rows]):
        with pytest.raises(ts.LayoutMismatchError, match=r"'w'.*share memory"):
            await ts.get("w", tensor)
        with pytest.raises(ts.LayoutMismatchError, match=r"'w'.*share memory"):
            await ts.get_batch({"w": tensor})
        assert (tensor == 0).all()
    await ts.put("v", torch.zeros(1, 4).expand(rows, 4))  # as a source it is as good as another
    assert torch.equal(await ts.get("v"), torch.zeros(rows, 4))
