"""Names mapped by a function; real ranks and DTensors are in test_dtensors.py."""

from typing import Any

import pytest
import torch

from skipper import torchstore as ts
from skipper.torchstore.algebra.layout import Box
from skipper.torchstore.algebra.manifest import Mode
from tests.torchstore import fused

pytestmark = pytest.mark.usefixtures("store")


class Unhashable:
    """A function that compares by value and says so, but not under which hash."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unhashable)

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, name: str) -> str:
        return name


def rows(*sizes: int) -> dict[str, torch.Tensor]:
    """Tensors "a", "b", ... of that many rows."""
    return {name: torch.randn(size, 30) for name, size in zip("abc", sizes, strict=False)}


@pytest.mark.parametrize("mode", ["snapshot", "direct"])
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 2)])
async def test_a_rank_takes_its_shards_of_fused_renamed_and_tied_tensors(mode: Mode, rank: int, size: int) -> None:
    full = fused.huggingface()
    await ts.put_state_dict(full, "policy", mode=mode)
    mine = fused.vllm_tensors(rank, size)
    got = await ts.get_state_dict("policy", mine, names=fused.names_for(rank, size))
    assert got is mine
    expected = fused.vllm_expected(full, rank, size)
    assert [name for name, tensor in expected.items() if not torch.equal(mine[name], tensor)] == []
    assert not bool(mine["language_model.rotary.inverse_frequencies"].any())


async def test_the_plan_of_a_function_is_found_again_and_that_of_another_is_not_taken_for_it() -> None:
    stored = rows(3, 3)
    await ts.put_state_dict(stored, "s", mode="direct")
    mine = {"x": torch.zeros(3, 30)}
    hits = []
    for wanted in "abab":
        for _ in range(2):
            await ts.get_state_dict("s", mine, False, names={"x": wanted}.__getitem__)
            assert torch.equal(mine["x"], stored[wanted])
        hits.append(await ts.explain("s", mine, False, names={"x": wanted}.__getitem__))
    names = {"x": "a"}.__getitem__
    for hit in (False, True):
        await ts.get_state_dict("s", mine, False, names=names)
        record = ts.last_sync()
        assert record is not None
        assert record.plan_hit == hit
    assert [explained.nbytes for explained in hits] == [360] * 4


async def test_a_stack_fills_what_it_names_and_nothing_beside() -> None:
    stored = rows(3, 5)
    await ts.put_state_dict(stored, "s")
    frame = torch.zeros(12, 32)
    await ts.get_state_dict("s", {"ab": frame[2:10, 1:-1]}, names=lambda name: ts.Stack(*name))
    assert torch.equal(frame[2:10, 1:-1], torch.cat([stored["a"], stored["b"]]))
    frame[2:10, 1:-1].zero_()
    assert not bool(frame.any())


async def test_parts_take_a_fused_tensor_apart_along_any_dim() -> None:
    whole = torch.randn(12, 30)
    await ts.put_state_dict({"qkv": whole}, "s")
    parts = {"q": ts.Part("qkv", 0, 6), "k": ts.Part("qkv", 6, 8), "v": ts.Part("qkv", 8), "c": ts.Part("qkv", dim=-1)}
    columns = {"right": ts.Part("qkv", 10, dim=1), "second": ts.Part("qkv", chunk=(1, 4), dim=1)}
    mine = {"q": torch.zeros(6, 30), "k": torch.zeros(2, 30), "v": torch.zeros(4, 30), "c": torch.zeros(12, 30)}
    mine |= {"right": torch.zeros(12, 20), "second": torch.zeros(12, 8)}
    await ts.get_state_dict("s", mine, names=(parts | columns).__getitem__)
    expected = {"q": whole[:6], "k": whole[6:8], "v": whole[8:], "c": whole}
    expected |= {"right": whole[:, 10:], "second": whole[:, 8:16]}
    assert [name for name in mine if not torch.equal(mine[name], expected[name])] == []


async def test_columns_are_stacked_along_dim_one() -> None:
    stored = {"a": torch.randn(4, 3), "b": torch.randn(4, 9)}
    await ts.put_state_dict(stored, "s")
    mine = {"ab": torch.zeros(4, 12)}
    await ts.get_state_dict("s", mine, names=lambda name: ts.Stack(*name, dim=1))
    assert torch.equal(mine["ab"], torch.cat([stored["a"], stored["b"]], 1))


async def test_nested_state_dicts_come_back_as_given_with_objects_under_their_new_names() -> None:
    await ts.put_state_dict({"model": {"w": torch.ones(9)}, "step": 7}, "s")
    mine = {"engine": {"weight": torch.zeros(9)}, "at": 0, "own": "kept", "new": None}
    names = {"engine.weight": "model.w", "at": "step", "own": None, "new": "model.w"}
    got = await ts.get_state_dict("s", mine, names=names.__getitem__)
    assert got["engine"]["weight"] is mine["engine"]["weight"]
    assert (got["at"], got["own"], bool(mine["engine"]["weight"].all()), bool(got["new"].all())) == (
        7,
        "kept",
        True,
        True,
    )


ERRORS: list[tuple[dict[str, Any], Any, type[Exception], str]] = [
    ({"x": torch.zeros(3, 30)}, "z", ts.StateDictMismatchError, r"not stored: z \(for x\)"),
    ({"x": torch.zeros(3, 30)}, ts.Stack("a", "z"), ts.StateDictMismatchError, r"not stored: z \(for x\)"),
    ({"x": torch.zeros(4, 30)}, "a", ts.LayoutMismatchError, r"'s/a \(for x\)'.*\(3, 30\).*\(4, 30\)"),
    ({"x": torch.zeros(3, 30, dtype=torch.int32)}, "a", ts.DTypeMismatchError, r"'s/a \(for x\)'"),
    ({"x": torch.zeros(9, 30)}, ts.Stack("a", "b"), ts.LayoutMismatchError, r"'s/a \+ b \(for x\)'.*\(9, 30\)"),
    ({"x": torch.zeros(8, 31)}, ts.Stack("a", "b"), ts.LayoutMismatchError, r"'s/a \+ b \(for x\)'"),
    ({"x": torch.zeros(8, 30)}, ts.Stack("a", "b", dim=2), ts.LayoutMismatchError, r"stacked on dim 2"),
    ({"x": torch.zeros(8, 30, dtype=torch.int32)}, ts.Stack("a", "b"), ts.DTypeMismatchError, r"'s/a \(for x\[0\]\)'"),
    ({"x": torch.zeros(2, 30)}, ts.Part("a", 0, 4), ts.LayoutMismatchError, r"'s/a \(for x\)'.*not within"),
    ({"x": torch.zeros(2, 30)}, ts.Part("a", chunk=(2, 2)), ts.LayoutMismatchError, r"no chunk 2 of 2"),
    ({"x": torch.zeros(2, 30)}, ts.Part("a", dim=2), ts.LayoutMismatchError, r"about dim 2"),
    ({"x": torch.zeros(3, 30)}, "note", ts.KindMismatchError, r"'s/note \(for x\)'.*an object is stored"),
    ({"x": None}, ts.Stack("a", "b"), ts.KindMismatchError, r"'s/a \+ b \(for x\)'.*give a tensor for"),
    ({"x": torch.zeros(3, 30)}, 7, TypeError, r"names\('x'\) must return a string"),
]


@pytest.mark.parametrize(("mine", "answer", "error", "message"), ERRORS)
async def test_what_does_not_fit_is_told_with_both_names_before_a_byte_moves(
    mine: dict[str, Any], answer: Any, error: type[Exception], message: str
) -> None:
    await ts.put_state_dict(rows(3, 5) | {"note": "text"}, "s")
    untouched = torch.zeros(3, 30)
    answers = {"first": "a", "x": answer}
    with pytest.raises(error, match=message):
        await ts.get_state_dict("s", {"first": untouched, **mine}, False, names=answers.__getitem__)
    assert not bool(untouched.any())


async def test_what_no_name_asks_for_is_refused_unless_leniently() -> None:
    stored = rows(3, 5)
    await ts.put_state_dict(stored, "s")
    mine = {"x": torch.zeros(3, 30)}
    with pytest.raises(ts.StateDictMismatchError, match=r"stored but not in the given state dict: b"):
        await ts.get_state_dict("s", mine, names=lambda name: "a")
    await ts.get_state_dict("s", mine, False, names=lambda name: "a")
    assert torch.equal(mine["x"], stored["a"])


async def test_names_need_a_function_and_a_state_dict() -> None:
    await ts.put_state_dict(rows(3), "s")
    for names in ({"a": "b"}, Unhashable()):
        with pytest.raises(TypeError, match="function of a name"):
            await ts.get_state_dict("s", {}, names=names)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="give user_state_dict"):
        await ts.get_state_dict("s", names=str)
    with pytest.raises(ValueError, match="at least one part"):
        ts.Stack()


def test_chunks_are_those_of_torch() -> None:
    for size in range(8):
        for count in range(1, 5):
            chunks = [ts.Part("a", 1, 1 + size, (index, count)).window((9,)) for index in range(count)]
            theirs = [len(chunk) for chunk in torch.arange(1, 1 + size).chunk(count)] if size else []
            assert [box.shape[0] for box in chunks if box.numel] == theirs
            assert sum(box.numel for box in chunks) == size


def test_a_part_of_a_tensor_without_dims_is_all_of_it() -> None:
    assert ts.Part("a").window(()) == Box((), ())


async def test_fused_parts_are_dequantized_where_they_belong() -> None:
    stored = {"a": torch.randn(256, 384), "b": torch.randn(128, 384)}
    await ts.put_state_dict(stored, "s", transfer_dtype=ts.BlockFP8())
    plain = {name: torch.zeros_like(tensor) for name, tensor in stored.items()}
    await ts.get_state_dict("s", plain)
    mine = {"ab": torch.zeros(384, 384), "half": torch.zeros(128, 384)}
    names = {"ab": ts.Stack("a", "b"), "half": ts.Part("a", chunk=(1, 2))}
    await ts.get_state_dict("s", mine, names=names.__getitem__)
    assert torch.equal(mine["ab"], torch.cat([plain["a"], plain["b"]]))
    assert torch.equal(mine["half"], plain["a"][128:])
    assert (mine["half"] - stored["a"][128:]).abs().max() < 0.2


async def test_checksums_prove_fused_parts() -> None:
    stored = {"a": torch.randn(100, 70), "b": torch.randn(61, 70)}
    await ts.put_state_dict(stored, "s", mode="direct", checksum=True)
    mine, names = {"ab": torch.zeros(161, 70)}, {"ab": ts.Stack("a", "b")}.__getitem__
    await ts.get_state_dict("s", mine, names=names)
    assert torch.equal(mine["ab"], torch.cat([stored["a"], stored["b"]]))
    stored["b"][60, 69] += 1  # without a fence
    with pytest.raises(ts.ChecksumError, match=r"s/b \(for ab\[1\]\)"):
        await ts.get_state_dict("s", mine, names=names)


async def test_a_fused_tensor_takes_only_what_has_changed() -> None:
    stored = {"a": torch.randn(512, 512), "b": torch.randn(512, 512)}
    mine, names = {"ab": torch.zeros(1024, 512)}, {"ab": ts.Stack("a", "b")}.__getitem__
    for step in range(4):
        stored["b"][step] += 1
        await ts.put_state_dict(stored, "s", delta=True)
        await ts.get_state_dict("s", mine, names=names, delta=True)
        assert torch.equal(mine["ab"], torch.cat([stored["a"], stored["b"]]))
    record = ts.last_sync()
    assert record is not None
    assert record.nbytes < mine["ab"].nbytes / 2
