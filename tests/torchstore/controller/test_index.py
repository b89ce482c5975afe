"""Entries of state dicts that are put by themselves, and listings by whole components of keys."""

import pytest
import torch

from skipper import torchstore as ts
from skipper.torchstore.algebra.key_names import is_below
from skipper.torchstore.algebra.layout import Layout
from skipper.torchstore.algebra.manifest import Binding, Manifest, MeshPosition, TensorItem
from skipper.torchstore.controller.index import Index
from skipper.torchstore.controller.version import Contribution
from skipper.torchstore.protocol.messages import Wanted
from skipper.torchstore.protocol.origin import Origin, Turn
from skipper.torchstore.support.process import ProcessId

LARGE = 5000


@pytest.fixture(autouse=True)
def _store(store: None) -> None:
    """All tests here use the default store."""


def model(value: float) -> dict[str, object]:
    return {"w": torch.full((LARGE,), value), "b": torch.full((3,), value), "n": {"step": int(value)}}


def values(state: dict[str, object]) -> list[float]:
    w, b, n = state["w"], state["b"], state["n"]
    assert isinstance(w, torch.Tensor)
    assert isinstance(b, torch.Tensor)
    assert isinstance(n, dict)
    (large,), (small,) = set(w.tolist()), set(b.tolist())
    return [large, small, n["step"]]


async def overwrite(value: float) -> None:
    await ts.put("m/w", torch.full((LARGE,), value))
    await ts.put("m/b", torch.full((3,), value))
    await ts.put("m/n.step", int(value))


async def test_an_entry_that_is_put_by_itself_overwrites_that_of_the_state_dict() -> None:
    await ts.put_state_dict(model(1), "m")
    await overwrite(2)
    assert await ts.keys() == ["m/b", "m/n.step", "m/w"]
    assert [(await ts.get("m/w"))[0], (await ts.get("m/b"))[0], await ts.get("m/n.step")] == [2, 2, 2]
    assert values(await ts.get_state_dict("m")) == [2, 2, 2]
    mine = model(0)
    got = await ts.get_state_dict("m", mine)
    assert values(got) == [2, 2, 2]
    assert got["w"] is mine["w"]


async def test_an_exact_version_stays_as_it_was_put() -> None:
    await ts.put_state_dict(model(1), "m")
    await overwrite(2)
    assert values(await ts.get_state_dict("m", version=1)) == [1, 1, 1]


async def test_the_next_state_dict_takes_the_place_of_all_its_entries() -> None:
    await ts.put_state_dict(model(1), "m")
    await overwrite(2)
    await ts.put_state_dict(model(3), "m")
    assert [(await ts.get("m/w"))[0], (await ts.get("m/b"))[0], await ts.get("m/n.step")] == [3, 3, 3]
    assert values(await ts.get_state_dict("m")) == [3, 3, 3]
    await ts.put("m/b", torch.full((3,), 4.0))
    assert values(await ts.get_state_dict("m")) == [3, 4, 3]


async def test_an_entry_that_was_put_before_there_was_a_state_dict_is_overwritten_by_it() -> None:
    await overwrite(1)
    await ts.put_state_dict(model(2), "m")
    assert (await ts.get("m/b")).tolist() == [2.0] * 3
    assert values(await ts.get_state_dict("m")) == [2, 2, 2]


async def test_deleting_an_overwritten_entry_leaves_nothing_of_it_and_a_put_brings_it_back() -> None:
    await ts.put_state_dict(model(1), "m")
    await ts.put("m/b", torch.full((3,), 2.0))
    await ts.delete("m/b")
    assert not await ts.exists("m/b")
    with pytest.raises(ts.KeyNotFoundError, match="m/b"):
        await ts.get_state_dict("m")
    await ts.put("m/b", torch.full((3,), 3.0))
    assert values(await ts.get_state_dict("m")) == [1, 3, 1]


async def test_deleting_a_state_dict_deletes_what_has_overwritten_its_entries() -> None:
    await ts.put_state_dict(model(1), "m")
    await overwrite(2)
    await ts.delete("m")
    assert await ts.keys() == []


def test_a_replica_that_comes_late_takes_nobodys_place() -> None:
    def replica(rank: int) -> Contribution:
        item = TensorItem("torch.float32", (4,), Layout((4,)).pieces(()), 0, 0, (4,), 4)
        described = Manifest.of("state_dict", MeshPosition(), {"w": item}, (), {})
        turn = Turn(Origin("", rank, 2), f"session {rank}", 1, alone=True)
        memory = Binding(f"memory {rank}", "snapshot", "v0", ())
        return Contribution(ProcessId("here", rank, 1), MeshPosition(), described, memory, turn=turn)

    index = Index(lambda process, binding: None, lambda memory, spoilt: None, lambda history: None)
    assert index.contribute("m", replica(0), None).ready
    index.contribute("m/w", Contribution(ProcessId("here", 3, 1), MeshPosition(), None, None, inline=b"x"), None)
    index.contribute("m", replica(1), None)
    found = index.find(Wanted("m/w"))
    assert found is not None
    assert found[0].key == "m/w"


async def test_a_delta_read_after_an_overwritten_entry_is_whole() -> None:
    mine = {"w": torch.zeros(LARGE), "v": torch.zeros(LARGE)}
    source = {"w": torch.full((LARGE,), 1.0), "v": torch.full((LARGE,), 1.0)}
    await ts.put_state_dict(source, "m", delta=True)
    await ts.get_state_dict("m", mine, delta=True)
    await ts.put("m/w", torch.full((LARGE,), 5.0))
    await ts.get_state_dict("m", mine, delta=True)
    assert mine["w"][0] == 5
    source["v"].fill_(2)
    await ts.put_state_dict(source, "m", delta=True)
    await ts.get_state_dict("m", mine, delta=True)
    assert (mine["w"][0], mine["v"][0]) == (1, 2)


async def test_names_lead_to_an_overwritten_entry_and_refuse_a_part_of_it() -> None:
    await ts.put_state_dict({"w": torch.full((LARGE,), 1.0), "v": torch.full((LARGE,), 1.0)}, "m")
    await ts.put("m/w", torch.full((LARGE,), 2.0))
    mine = torch.zeros(LARGE)
    await ts.get_state_dict("m", {"mine": mine}, names=lambda _: "w", strict=False)
    assert mine[0] == 2
    fused = torch.zeros(2 * LARGE)
    with pytest.raises(ts.LayoutMismatchError, match=r"m/w.*part of fused"):
        await ts.get_state_dict("m", {"fused": fused}, names=lambda _: ts.Stack("w", "v"))


async def test_a_value_in_the_place_of_a_state_dict_is_read_alone() -> None:
    await ts.put_state_dict({"w": torch.full((LARGE,), 1.0)}, "m")
    await ts.put("m/w", torch.full((LARGE,), 2.0))
    await ts.put("m", 7)
    assert await ts.get("m") == 7
    client = await ts.client()
    assert await client.remote.controller.count_leases.call_one() == 0


async def test_keys_lists_by_whole_components() -> None:
    for key in ("", ".x", "v0.x", "v0.y", "v0.x.z", "v01.x", "v0/x"):
        await ts.put(key, torch.ones(3))
    assert await ts.keys() == ["", ".x", "v0.x", "v0.x.z", "v0.y", "v0/x", "v01.x"]
    assert await ts.keys("v0") == ["v0.x", "v0.x.z", "v0.y", "v0/x"]
    assert await ts.keys("v0.x") == ["v0.x", "v0.x.z"]
    assert await ts.keys("v0.x.z") == ["v0.x.z"]
    assert await ts.keys("") == ["", ".x"]
    assert await ts.keys("v") == []
    assert await ts.keys("v0.") == ["v0.x", "v0.x.z", "v0.y"]


@pytest.mark.parametrize(
    ("key", "prefix", "expected"),
    [
        ("a.b", None, True),
        ("a", "a", True),
        ("a.b", "a", True),
        ("a/b", "a", True),
        ("ab", "a", False),
        ("a.b", "a.", True),
        ("a.b", "a/", False),
        ("a", "a.b", False),
        ("", "", True),
        (".a", "", True),
        ("a", "", False),
    ],
)
def test_a_prefix_has_the_keys_that_begin_with_its_components(key: str, prefix: str | None, expected: bool) -> None:
    assert is_below(key, prefix) is expected
