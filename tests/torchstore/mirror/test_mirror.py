"""Publisher and reader together: what arrives, what is moved for it, and what is kept."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from skipper import torchstore as ts
from skipper.torchstore.mirror import SigningKey
from tests.torchstore.mirror.places import chunks_of, files_of, mirror_at, reader_at
from tests.torchstore.tensors.test_local_tensors import rank_of

pytestmark = pytest.mark.usefixtures("store")


def model_of(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "layers": [{"w": torch.randn(100, 70, generator=generator)}, {"w": torch.randn(33, 9, generator=generator)}],
        "half": torch.randn(5000, generator=generator).bfloat16(),
        "mask": torch.randn(11, 3, generator=generator) > 0,
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(seed * 1.5),
        "fp4": torch.arange(60, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "step": seed,
        "note": {"lr": 0.1, "names": ["a", None]},
    }


def same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[name], right[name]) for name in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, torch.Tensor):
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))
    return bool(left == right)


@pytest.mark.parametrize("url", ["{}", "file://{}", "memory://{}"])
async def test_versions_arrive_as_they_were_put(tmp_path: Path, url: str) -> None:
    place = url.format(tmp_path)
    with mirror_at(place) as mirror, reader_at(place) as reader:
        for seed in (1, 2, 3):
            await ts.put_state_dict(model_of(seed), "policy", version=seed * 10)
            assert await mirror.publish() == seed * 10
            assert await reader.latest() == seed * 10
            assert same(await reader.get_state_dict(), model_of(seed))
            mine = model_of(9)
            filled = await reader.get_state_dict(mine)
            assert filled["half"] is mine["half"]
            assert same(filled, model_of(seed))


async def test_only_chunks_that_have_changed_are_written_and_fetched(tmp_path: Path) -> None:
    weight = torch.randn(256, 256)
    with mirror_at(tmp_path) as mirror, reader_at(tmp_path) as reader:
        await ts.put_state_dict({"w": weight, "twin": weight.clone()}, "policy")
        await mirror.publish()
        assert len(chunks_of(tmp_path)) == 64  # of 4 KiB; those of the twin are the same
        mine = {"w": torch.zeros(256, 256), "twin": torch.zeros(256, 256)}
        await reader.get_state_dict(mine, delta=True)
        assert reader.last_read is not None
        assert (reader.last_read.chunks, reader.last_read.fetched_nbytes) == (64, weight.nbytes)
        before = {path.name: path.stat().st_mtime_ns for path in chunks_of(tmp_path)}
        weight[100, 100] += 1
        await ts.put_state_dict({"w": weight, "twin": mine["twin"].clone()}, "policy")
        await mirror.publish()
        after = {path.name: path.stat().st_mtime_ns for path in chunks_of(tmp_path)}
        assert len(after.keys() - before.keys()) == 1
        assert all(after[name] == before[name] for name in before)
        await reader.get_state_dict(mine, delta=True)
        assert torch.equal(mine["w"], weight)
        assert (reader.last_read.chunks, reader.last_read.skipped_chunks) == (1, 127)
        other = {"w": torch.zeros(256, 256), "twin": torch.zeros(256, 256)}  # holds nothing: all of it
        await reader.get_state_dict(other, delta=True)
        assert torch.equal(other["w"], weight)
        assert reader.last_read.chunks == 65


@pytest.mark.parametrize("placements", [(Shard(0), Shard(1)), (Shard(1), Replicate()), (Shard(1), Shard(1))])
async def test_a_rank_fetches_what_its_boxes_touch(tmp_path: Path, placements: tuple[Any, ...]) -> None:
    whole = torch.randn(120, 130)
    await ts.put_state_dict({"w": whole}, "policy")
    with mirror_at(tmp_path, chunk_nbytes=256) as mirror:
        await mirror.publish()
    with reader_at(tmp_path) as reader:
        for rank in (0, 5):
            with rank_of(rank, 6):
                mesh = init_device_mesh("cpu", (3, 2))
                full = DTensor.from_local(whole, mesh, [Replicate(), Replicate()], run_check=False)
                wanted = full.redistribute(mesh, placements).to_local().contiguous()
                mine = DTensor.from_local(
                    torch.zeros_like(wanted),
                    mesh,
                    placements,
                    run_check=False,
                    shape=whole.shape,
                    stride=whole.stride(),
                )
                await reader.get_state_dict({"w": mine})
                assert torch.equal(mine.to_local(), wanted)
                assert reader.last_read is not None
                assert reader.last_read.fetched_nbytes < whole.nbytes * 0.6


@pytest.mark.parametrize("kind", [ts.BlockFP8((16, 16)), ts.MXFP8(), ts.NVFP4()], ids=["fp8", "mx", "nv"])
async def test_quantized_tensors_arrive_as_bits_or_as_values(tmp_path: Path, kind: Any) -> None:
    weight = torch.randn(64, 96)
    weight[0, 0] = 50  # the largest stays the same, which the scales of all blocks of NVFP4 hang on
    bits: dict[str, Any] = {}
    values, mine = {"w": torch.zeros(64, 96)}, {"w": torch.zeros(64, 96)}
    with mirror_at(tmp_path, chunk_nbytes=256) as mirror, reader_at(tmp_path) as reader:
        for _ in range(3):
            weight[3, 5] += 1
            await ts.put_state_dict({"w": weight}, "policy", transfer_dtype=kind)
            await mirror.publish()
            bits = await ts.get_state_dict("policy")
            await ts.get_state_dict("policy", values)
            assert same(await reader.get_state_dict(), bits)
            await reader.get_state_dict(mine, delta=True)
            assert torch.equal(mine["w"], values["w"])
        assert reader.last_read is not None
        assert 0 < reader.last_read.chunks < reader.last_read.skipped_chunks


async def test_old_versions_go_and_with_them_what_no_kept_one_needs(tmp_path: Path) -> None:
    fixed = torch.randn(64, 64)
    with mirror_at(tmp_path, keep=2) as mirror, reader_at(tmp_path) as reader:
        for seed in range(1, 6):
            await ts.put_state_dict({"w": torch.full((64, 64), float(seed)), "fixed": fixed}, "policy")
            await mirror.publish()
        versions = sorted(path.name for path in (tmp_path / "policy" / "versions").iterdir())
        assert [int(name.removesuffix(".json")) for name in versions] == [4, 5]
        for seed in (4, 5):
            assert bool(((await reader.get_state_dict(version=seed))["w"] == seed).all())
        with pytest.raises(ts.VersionNotFoundError):
            await reader.get_state_dict(version=3)
        assert len(chunks_of(tmp_path)) == 2 + 4  # all chunks of a constant are one
        assert await mirror.sweep() == 0


async def test_a_reader_of_a_version_that_goes_meanwhile_gets_the_next(tmp_path: Path) -> None:
    with mirror_at(tmp_path, keep=1) as mirror, reader_at(tmp_path, workers=1) as reader:
        await ts.put_state_dict({"w": torch.randn(64, 64)}, "policy")
        await mirror.publish()
        ensure, raced = reader._ensure, list[int]()

        def late(chunk: tuple[str, int]) -> int:
            """The chunks of the first version are asked for when a second one has taken its place."""
            if not raced:
                raced.append(asyncio.run_coroutine_threadsafe(replace(), loop).result(60))
            return ensure(chunk)

        async def replace() -> int:
            await ts.put_state_dict({"w": torch.ones(64, 64)}, "policy")
            return await mirror.publish()

        loop = asyncio.get_running_loop()
        reader._ensure = late  # type: ignore[method-assign]
        assert bool(((await reader.get_state_dict())["w"] == 1).all())
        assert reader.last_read is not None
        assert [reader.last_read.version] == raced


async def test_followers_get_each_version_as_it_comes(tmp_path: Path) -> None:
    mine = {"w": torch.zeros(64, 64)}
    with mirror_at(tmp_path) as mirror, reader_at(tmp_path) as reader:

        async def follow() -> list[tuple[int, float]]:
            seen = []
            async for number in reader.follow(mine, timeout=60):
                seen.append((number, mine["w"][0, 0].item()))
                got.set()
                if number == 3:
                    return seen
            raise AssertionError("it ends by itself only")

        got = asyncio.Event()
        following = asyncio.ensure_future(follow())
        for number in (1, 2, 3):
            got.clear()
            await ts.put_state_dict({"w": torch.full((64, 64), float(number))}, "policy")
            await mirror.publish()
            await got.wait()
        assert await following == [(1, 1.0), (2, 2.0), (3, 3.0)]
        with pytest.raises(ts.StoreTimeoutError, match="newer than 3"):
            await reader.get_state_dict(version=("newer_than", 3), timeout=0.05)


async def test_a_version_is_relayed_into_a_store(tmp_path: Path) -> None:
    with mirror_at(tmp_path) as mirror, reader_at(tmp_path) as reader:
        after = -1
        for seed in (1, 2):
            model = model_of(1)
            model["step"], model["layers"][0]["w"][0, 0] = seed, float(seed)
            await ts.put_state_dict(model, "policy", version=seed + 40)
            await mirror.publish()
            after = await reader.relay("copy", after=after)
            assert after == seed + 40
            assert same(await ts.get_state_dict("copy", version=after), model)
        assert reader.last_read is not None
        assert reader.last_read.chunks == 1


async def test_keys_of_ed25519_let_readers_read_and_nothing_else(tmp_path: Path) -> None:
    key = SigningKey.generate()
    await ts.put_state_dict(model_of(1), "policy")
    with mirror_at(tmp_path, signer=key) as mirror:
        await mirror.publish()
    with reader_at(tmp_path, verifier=key.verifying_key) as reader:
        assert same(await reader.get_state_dict(), model_of(1))
    with reader_at(tmp_path) as other, pytest.raises(ts.MirrorSignatureError, match="ed25519"):
        await other.get_state_dict()
    with (
        reader_at(tmp_path, verifier=SigningKey.generate().verifying_key) as other,
        pytest.raises(ts.MirrorSignatureError, match="not that of the publisher"),
    ):
        await other.get_state_dict()


async def test_what_another_job_cannot_open_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    await ts.put_state_dict({"w": torch.ones(3), "opaque": {1, 2}}, "policy")
    with mirror_at(tmp_path) as mirror, pytest.raises(ts.KindMismatchError, match=r"policy/opaque.*set"):
        await mirror.publish()
    assert files_of(tmp_path) == {}


async def test_destinations_that_do_not_fit_are_refused_before_a_chunk_is_fetched(tmp_path: Path) -> None:
    await ts.put_state_dict({"w": torch.ones(8, 8), "v": torch.zeros(8, 8)}, "policy")
    with mirror_at(tmp_path) as mirror, reader_at(tmp_path) as reader:
        await mirror.publish()
        for path in chunks_of(tmp_path):
            path.unlink()
        with pytest.raises(ts.StateDictMismatchError):
            await reader.get_state_dict({"u": torch.zeros(8, 8)})
        with pytest.raises(ts.LayoutMismatchError):
            await reader.get_state_dict({"w": torch.zeros(8, 9)}, strict=False)
        with pytest.raises(ts.DTypeMismatchError):
            await reader.get_state_dict({"w": torch.zeros(8, 8).double()}, strict=False)
        shared = torch.zeros(9, 8)
        with pytest.raises(ts.DestinationOverlapError):
            await reader.get_state_dict({"w": shared[1:], "v": shared[:8]})


async def test_a_mirror_that_is_empty_or_unreachable_says_so(tmp_path: Path) -> None:
    with reader_at(tmp_path) as reader:
        with pytest.raises(ts.KeyNotFoundError, match="no version"):
            await reader.get_state_dict()
        with pytest.raises(ts.KeyNotFoundError):
            await reader.latest()
    (tmp_path / "policy").write_text("a file in its place")
    await ts.put_state_dict({"w": torch.ones(8, 8)}, "policy")
    with mirror_at(tmp_path) as mirror, pytest.raises(ts.MirrorUnreachableError):
        await mirror.publish()


@pytest.mark.parametrize("options", [{"keep": 0}, {"chunk_nbytes": 8}, {"workers": 0}, {"memory_nbytes": 0}])
def test_impossible_arguments_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        mirror_at(tmp_path, **options)
