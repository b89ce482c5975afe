"""Real DTensors over a real gloo process group of four processes, resharded and compared with full_tensor().

All ranks put and get many tensors at a time, as state dicts do; DTensor's collectives (`full_tensor`, `redistribute`)
and DCP make the oracles. The long run is ``python -m tests.torchstore.layouts --pairs 10000``.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from skipper import torchstore as ts
from skipper.control import this_host
from skipper.torchstore.algebra.manifest import Mode
from tests.torchstore.actors import ShardedPeer
from tests.torchstore.layout_ranks import LayoutRank
from tests.torchstore.layouts import check, drawn

WORLD_SIZE = 4
CASES_PER_SYNC = 60
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]


@pytest.fixture(scope="module")
def procs() -> Iterator[Any]:
    procs = this_host().spawn_procs(per_host={"gpus": WORLD_SIZE})
    yield procs
    procs.stop().get(timeout=20)


@pytest.fixture(scope="module")
def ranks(procs: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    address = f"file://{Path(tmp_path_factory.mktemp('gloo')) / 'rendezvous'}"
    mesh = procs.spawn("ranks", ShardedPeer)
    mesh.join.call(address, WORLD_SIZE).get(timeout=60)
    yield mesh
    mesh.leave.call().get(timeout=20)


def random_side(source: random.Random, ndim: int) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    mesh = source.choice([(4,), (2, 2)])
    choices = [Replicate(), *(Shard(dim) for dim in range(ndim))]
    return mesh, tuple(source.choice(choices) for _ in mesh)


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("mode", ["snapshot", "direct"])
@pytest.mark.parametrize("seed", range(3))
async def test_reshards_of_dtensors_equal_the_full_tensor_cut_again(ranks: Any, mode: Mode, seed: int) -> None:
    source = random.Random(seed)
    cases = []
    for _ in range(CASES_PER_SYNC):
        ndim = source.randint(1, 3)
        shape = tuple(source.randint(1, 9) for _ in range(ndim))
        cases.append((source.choice(DTYPES), shape, random_side(source, ndim), random_side(source, ndim)))
    equal = await ranks.reshard.call(f"r{seed}", mode, cases)
    assert list(equal) == [CASES_PER_SYNC] * WORLD_SIZE


@pytest.mark.usefixtures("store")
async def test_a_dtensor_is_visible_only_when_every_rank_has_put_its_shard(ranks: Any) -> None:
    full = torch.arange(36.0).reshape(9, 4)
    await ranks.slice(gpus=slice(0, 3)).put_shard.call("d", full)
    assert not await ts.exists("d")
    with pytest.raises(ts.PartiallyPublishedError, match="rank 3 of 4"):
        await ts.get("d")
    await ranks.slice(gpus=3).put_shard.call_one("d", full)
    assert torch.equal(await ts.get("d"), full)
    assert await ts.versions("d") == (1,)
    record = ts.last_sync()
    assert record is not None
    assert record.slowest_rank == (3,)
    assert record.spread_s > 0


@pytest.mark.usefixtures("store")
async def test_a_plain_get_of_a_dtensor_is_the_full_tensor_and_a_slice_its_part(ranks: Any) -> None:
    full = torch.randn(9, 4)
    await ranks.put_shard.call("d", full)
    spec = ts.TensorSlice(offsets=(1, 1), coordinates=(), global_shape=(9, 4), local_shape=(7, 2), mesh_shape=())
    assert torch.equal(await ts.get("d"), full)
    assert torch.equal(await ts.get("d", tensor_slice_spec=spec), full[1:8, 1:3])
    gathered = await ranks.get_shard.call("d", full)
    assert all(gathered)


@pytest.mark.usefixtures("store")
async def test_a_tensor_put_by_one_process_can_be_read_as_a_dtensor(ranks: Any) -> None:
    full = torch.randn(90, 40)
    await ts.put("plain", full)
    assert all(await ranks.get_shard.call("plain", full))


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("rows", [64, 61])
async def test_fsdp2_parameters_move_to_shared_memory_and_still_train(ranks: Any, rows: int) -> None:
    assert all(await ranks.train_shared.call(rows))


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("mode", ["snapshot", "direct"])
async def test_fsdp2_weights_reach_a_tensor_parallel_layout(ranks: Any, mode: Mode) -> None:
    assert all(await ranks.sync_fsdp.call(f"fsdp-{mode}", mode))


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("mode", ["snapshot", "direct"])
async def test_weights_arrive_under_other_names_and_fused(ranks: Any, mode: Mode) -> None:
    assert list(await ranks.sync_fused.call(f"fused-{mode}", mode)) == [[]] * WORLD_SIZE


@pytest.mark.usefixtures("store", "ranks")
async def test_pairs_of_layouts_equal_what_dtensor_and_dcp_make_of_them(procs: Any) -> None:
    pairs = drawn(60, WORLD_SIZE, 0)
    verdict = await check(procs.spawn("layouts", LayoutRank), pairs, with_dcp=60)
    assert (verdict.pairs, verdict.wrong) == (60, [])
    assert (verdict.not_as_redistributed, verdict.not_as_checkpointed) == ([], [])
    assert min(verdict.redistributed, verdict.checkpointed) > 10
