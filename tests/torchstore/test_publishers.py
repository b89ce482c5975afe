"""One version of publishers that no mesh holds together: stages of a pipeline, each with a mesh of its own or none."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from skipper import torchstore as ts
from skipper.torchstore.adapters.weights import mesh_of
from skipper.torchstore.algebra.manifest import Mode
from tests.torchstore.tensors.test_local_tensors import rank_of

pytestmark = pytest.mark.usefixtures("store")

MODES: list[Mode] = ["snapshot", "direct"]


@pytest.fixture
async def ranks(store: None) -> AsyncIterator[list[ts.LocalClient]]:
    """This process, playing four."""
    remote = (await ts.client()).remote
    clients = [ts.LocalClient(replace(remote)) for _ in range(4)]
    yield clients
    for client in clients:
        client.close()


@pytest.mark.parametrize("mode", MODES)
async def test_a_version_of_stages_is_visible_when_all_of_them_have_put(mode: Mode, ranks: Any) -> None:
    stages = [{"first": torch.ones(5, 3), "step": 1}, {"last": torch.ones(4)}]
    for number in (1, 2):
        for stage, state in enumerate(stages):
            if number == 1:
                with pytest.raises(ts.KeyNotFoundError):
                    await ts.get_state_dict("p")
            else:
                assert await ts.versions("p") == ((1,) if mode == "snapshot" or not stage else ())
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.fill_(number)
            put = ranks[stage].put_state_dict(state, "p", mode=mode, publisher=(stage, 2))
            assert await put == number
        read = await ts.get_state_dict("p")
        assert set(read) == {"first", "step", "last"}
        assert {float(tensor.unique()) for tensor in (read["first"], read["last"])} == {number}


async def test_stages_have_meshes_of_their_own_and_replicas_are_stored_once(ranks: Any) -> None:
    rows, columns = torch.randn(6, 4), torch.randn(4, 6)
    for rank, client in enumerate(ranks):
        with rank_of(rank, 4):
            whole = (rows, columns)[rank // 2]
            mesh = mesh_of("cpu", (0, 1) if rank < 2 else (2, 3), (2,))
            local = whole.chunk(2)[rank % 2] if rank < 2 else whole.clone()
            placement: Any = Shard(0) if rank < 2 else Replicate()
            shard = DTensor.from_local(
                local, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
            )
            await client.put_state_dict({f"stage {rank // 2}": shard}, "p", publisher=(rank, 4))
    read = await ts.get_state_dict("p")
    assert torch.equal(read["stage 0"], rows)
    assert torch.equal(read["stage 1"], columns)
    (volume,) = (await ts.client()).remote.info.volumes.values()
    assert (await volume.usage.call_one())[0] == 3  # two shards, one of two replicas


async def test_what_nobody_has_put_is_named(ranks: Any) -> None:
    with rank_of(0, 2):
        shard = DTensor.from_local(torch.ones(3, 2), init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False)
        await ranks[0].put_state_dict({"w": shard}, "p", publisher=(0, 2))
    await ranks[1].put_state_dict({"b": torch.ones(2)}, "p", publisher=(1, 2))
    with pytest.raises(ts.PartiallyPublishedError, match=r"w\[offsets \(3, 0\), shape \(3, 2\)\]"):
        await ts.get_state_dict("p")


@pytest.mark.parametrize("publisher", [(2, 2), (-1, 2), (0,), 3, ("0", 1)])
async def test_an_impossible_publisher_is_refused(publisher: Any) -> None:
    with pytest.raises(ValueError, match="publisher is"):
        await ts.put_state_dict({"w": torch.ones(2)}, "p", publisher=publisher)
    assert not await ts.exists("p")
