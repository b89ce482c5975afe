"""DCP saves into the store and loads from it: resharded by its own planner, whole or not at all, by version."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from skipper import torchstore as ts
from skipper.torchstore.clients.pinning import PinnedBlock
from skipper.torchstore.dcp import StoreReader, StoreWriter, load_from_directory, save_to_directory
from skipper.torchstore.dcp.records import part_of
from skipper.torchstore.tensors.state_dict import Flattened, path_of
from tests.torchstore.dcp.conftest import same, same_everywhere
from tests.torchstore.dcp.ranks import gathered

pytestmark = [
    pytest.mark.usefixtures("store"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),  # by DCP itself, of PyTorch 2.8
]


async def first(results: Any) -> Any:
    return next(iter((await results).values()))


async def test_a_checkpoint_is_loaded_on_another_mesh_bit_for_bit(two: Any, four: Any) -> None:
    await two.train.call(0, 3)
    expected = await first(two.whole.call())
    (where, _) = (await two.save.call("step")).values()
    assert (where.key, where.version) == ("step", 1)
    await four.train.call(50, 2)
    await four.load.call("step")
    assert same_everywhere(await four.whole.call(), expected)
    assert torch.allclose(
        torch.tensor(await first(two.train.call(3, 2))), torch.tensor(await first(four.train.call(3, 2)))
    )


async def test_what_dcp_has_saved_and_what_was_put_are_the_same_to_readers(two: Any, four: Any) -> None:
    await two.train.call(0, 2)
    expected = await first(two.whole.call())
    await two.save.call("saved")
    await two.put.call("put")
    read = await ts.get_state_dict("saved")
    assert same(gathered(read), gathered(await ts.get_state_dict("put")))
    assert same(gathered(read), expected)
    assert sorted(await ts.keys("saved")) == sorted(key.replace("put/", "saved/") for key in await ts.keys("put"))
    await four.load.call("put")
    assert same_everywhere(await four.whole.call(), expected)
    await four.build.call((2, 2), ("dp", "tp"))
    await four.train.call(9, 1)
    await four.get.call("saved")
    assert same_everywhere(await four.whole.call(), expected)


async def test_versions_are_kept_and_loaded_by_number(two: Any, four: Any) -> None:
    states = []
    for step in range(3):
        await two.train.call(step, 1)
        states.append(await first(two.whole.call()))
        await two.save.call("run", keep=2)
    await two.save.call("other", version=40)
    assert await (await ts.client()).versions("run") == (2, 3)
    for version, state in ((2, states[1]), (3, states[2]), ("latest", states[2])):
        await four.load.call("run", version=version)
        assert same_everywhere(await four.whole.call(), state)
    await four.load.call("run", checkpoint_id="other")
    assert await (await ts.client()).versions("other") == (40,)


async def test_a_save_in_the_background_saves_what_was_there_when_it_began(two: Any) -> None:
    await two.train.call(0, 2)
    expected = await first(two.whole.call())
    await two.save_later.call("later")
    assert not same(await first(two.whole.call()), expected)
    await two.load.call("later")
    assert same_everywhere(await two.whole.call(), expected)


async def test_a_save_that_fails_leaves_the_last_version_and_mixes_with_none(two: Any) -> None:
    await two.train.call(0, 1)
    await two.save.call("run")
    for message in (await two.failing_save.call("run")).values():
        assert "not this one" in message
    assert await (await ts.client()).versions("run") == (1,)
    await two.train.call(1, 1)
    expected = await first(two.whole.call())
    await two.save.call("run")
    await two.load.call("run")
    assert same_everywhere(await two.whole.call(), expected)
    assert len(await (await ts.client()).versions("run")) == 1


async def test_a_checkpoint_goes_to_disk_and_back(two: Any, four: Any, tmp_path: Path) -> None:
    await two.train.call(0, 3)
    expected = await first(two.whole.call())
    await two.save.call("run")
    await four.drain.call("run", tmp_path / "by four")
    save_to_directory("run", tmp_path / "by one")
    save_to_directory("run", tmp_path / "by one")  # in the place of the first
    for directory in ("by four", "by one"):
        await two.build.call((2,), ("dp",))
        await two.load_from_disk.call(tmp_path / directory)
        assert same_everywhere(await two.whole.call(), expected)

    await four.train.call(40, 2)
    other = await first(four.whole.call())
    await four.save_on_disk.call(tmp_path / "by dcp")
    assert set((await two.fill.call(tmp_path / "by dcp", "run", version=7)).values()) == {7}
    await four.build.call((2, 2), ("dp", "tp"))
    await four.load.call("run", version=7)
    assert same_everywhere(await four.whole.call(), other)
    assert load_from_directory(tmp_path / "by dcp", "alone") == 1
    assert same(gathered(await ts.get_state_dict("alone")), other)


# In one process ---------------------------------------------------------------------------------------------


def plain(seed: int = 1) -> dict[str, Any]:
    made = torch.Generator().manual_seed(seed)
    return {
        "model": {"w": torch.randn(33, 17, generator=made), "scalar": torch.tensor(seed), "none": torch.empty(0, 4)},
        "list": [torch.randn(2000, generator=made), {"deep": torch.ones(3, dtype=torch.bfloat16) * seed}],
        "hyper": {"lr": 0.1 * seed, "betas": (0.9, 0.95), "names": ["a", "b"]},
        "strided": torch.randn(40, 40, generator=made).t()[::2, 1:],
    }


def blank(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: blank(value) for name, value in state.items()}
    if isinstance(state, list) and not all(isinstance(value, str) for value in state):
        return [blank(value) for value in state]
    return torch.zeros_like(state) if isinstance(state, torch.Tensor) else None


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def save(state: Any, key: str, *, planner: Any = None, **options: Any) -> Any:
    return dcp.save(state, storage_writer=StoreWriter(key, **options), planner=planner)


def load(state: Any, key: str, **options: Any) -> Any:
    dcp.load(state, storage_reader=StoreReader(key, **options))
    return state


async def test_any_state_dict_comes_back_as_it_was() -> None:
    metadata = save(plain(), "any")
    assert metadata.storage_data.version == 1
    assert equal(load(blank(plain()), "any"), plain())
    read = await ts.get_state_dict("any")
    assert equal(read["list"], plain()["list"])
    assert read["hyper"] == plain()["hyper"]


async def test_the_metadata_is_that_which_dcp_writes_to_disk(tmp_path: Path) -> None:
    save(plain(), "any")
    save_to_directory("any", tmp_path)
    stored, on_disk = StoreReader("any").read_metadata(), dcp.FileSystemReader(tmp_path).read_metadata()
    dcp.save(plain(), checkpoint_id=tmp_path / "dcp")
    by_dcp = dcp.FileSystemReader(tmp_path / "dcp").read_metadata()
    strided = by_dcp.state_dict_metadata["strided"].properties
    if hasattr(strided, "strides"):  # from torch 2.15 on
        strided.strides = torch.empty(plain()["strided"].shape).stride()  # the store holds every tensor row by row
    for found in (stored, on_disk):
        assert found.state_dict_metadata == by_dcp.state_dict_metadata
        assert found.planner_data == by_dcp.planner_data
    assert equal(load_disk(tmp_path), plain())


def load_disk(directory: Path) -> Any:
    state = blank(plain())
    dcp.load(state, checkpoint_id=directory)
    return state


async def test_a_version_that_is_being_loaded_outlives_its_successors() -> None:
    save(plain(1), "run")
    reader = StoreReader("run")
    reader.read_metadata()
    save(plain(2), "run")
    assert await (await ts.client()).versions("run") == (2,)
    held = reader._pinned
    assert held is not None
    into = torch.zeros(33, 17)
    await held.read([PinnedBlock("model.w", (0, 0), into)], 60)
    assert torch.equal(into, plain(1)["model"]["w"])
    await ts.delete("run")  # and its deletion
    assert await ts.keys("run") == []
    await held.read([PinnedBlock("model.w", (0, 0), into.zero_())], 60)
    assert torch.equal(into, plain(1)["model"]["w"])
    reader.close()
    with pytest.raises(ValueError, match="was released"):
        await held.read([], 60)


async def test_values_are_converted_where_the_destination_has_another_dtype() -> None:
    save({"w": torch.arange(5000.0)}, "wide")
    into = load({"w": torch.zeros(5000, dtype=torch.float64)}, "wide")
    assert torch.equal(into["w"], torch.arange(5000.0).double())
    await ts.put_state_dict({"w": torch.ones(256, 256)}, "narrow", transfer_dtype=ts.BlockFP8())
    into = load({"w": torch.zeros(256, 256)}, "narrow")
    assert torch.equal(into["w"], torch.ones(256, 256))


async def test_a_planner_that_encodes_in_its_own_way_is_given_back_what_it_wrote() -> None:
    class Shouting(dcp.DefaultSavePlanner):
        def transform_object(self, write_item: Any, object: Any) -> Any:
            return io.BytesIO(str(object).upper().encode()) if isinstance(object, str) else object

    class Whispering(dcp.DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            self.original_state_dict[read_item.dest_index.fqn] = value.read().decode().lower()

    save({"word": "Quiet", "w": torch.ones(3)}, "own", planner=Shouting())
    state = {"word": "", "w": torch.zeros(3)}
    dcp.load(state, storage_reader=StoreReader("own"), planner=Whispering())
    assert state["word"] == "quiet"


async def test_what_is_not_there_is_said() -> None:
    with pytest.raises(dcp.CheckpointException, match="nothing"):
        load({"w": torch.zeros(3)}, "nothing")
    await ts.put("value", torch.ones(3))
    with pytest.raises(dcp.CheckpointException, match="a single value is stored"):
        load({"w": torch.zeros(3)}, "value")
    save({"w": torch.ones(3)}, "there")
    with pytest.raises(dcp.CheckpointException, match="Size mismatch"):
        load({"w": torch.zeros(4)}, "there")
    with pytest.raises(dcp.CheckpointException, match="v"):
        load({"v": torch.zeros(4)}, "there")
    assert equal(load({"w": torch.zeros(3)}, "there"), {"w": torch.ones(3)})
    with pytest.raises(ts.KeyNotFoundError):
        save_to_directory("nothing", "/nowhere")


async def test_bad_input_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    for kind in (StoreReader, StoreWriter):
        with pytest.raises(TypeError, match="a key"):
            kind(3)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="a key"):
            kind("")
        with pytest.raises(ValueError, match="timeout"):
            kind("k", timeout=float("nan"))
        assert kind.validate_checkpoint_id("k")
        assert not kind.validate_checkpoint_id("")
    with pytest.raises(dcp.CheckpointException, match="copies=2 needs 2 volumes"):
        save({"w": torch.ones(3)}, "m", copies=2)
    with pytest.raises(dcp.CheckpointException):
        load_from_directory(tmp_path, "m")
    assert not await ts.exists("m")


async def test_a_plan_of_an_earlier_save_is_not_written_as_a_new_version() -> None:
    caching = {"flatten_state_dict": True, "enable_plan_caching": True}
    save(plain(1), "cached", planner=dcp.DefaultSavePlanner(**caching))
    with pytest.raises(dcp.CheckpointException, match="enable_plan_caching"):
        save(plain(2), "cached", planner=dcp.DefaultSavePlanner(**caching))
    save(plain(3), "cached", version=9, planner=dcp.DefaultSavePlanner(**caching))
    assert equal(load(blank(plain()), "cached", version=9), plain(3))


@pytest.mark.skipif(torch.__version__ < "2.9", reason="DCP before PyTorch 2.9 has no use_collectives")
def test_a_save_without_collectives_is_refused() -> None:
    with pytest.raises(ValueError, match="use_collectives"):
        dcp.save(plain(), storage_writer=StoreWriter("alone"), use_collectives=False)


async def test_several_chunks_of_one_rank_lie_beside_each_other() -> None:
    whole = torch.randn(6, 5)
    parts = [((0, 0), whole[:2, :3]), ((0, 3), whole[:2, 3:]), ((2, 0), whole[2:]), ((6, 0), whole[6:])]
    leaf = part_of("w", whole.dtype, (6, 5), parts)
    await (await ts.client()).put_state_dict(Flattened({"w": leaf}, {"w": path_of(("w",))}), "chunks")
    assert torch.equal((await ts.get_state_dict("chunks"))["w"], whole)
    with pytest.raises(ts.LayoutMismatchError, match="not within"):
        part_of("w", whole.dtype, (6, 5), [((5, 0), whole[:2])])
    with pytest.raises(ts.KindMismatchError, match="a chunk of"):
        part_of("w", torch.float64, (6, 5), [((0, 0), whole)])
