"""`torchstore.utils`, `transport` and `logging`: what scripts written for Meta's torchstore import."""

import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from skipper import torchstore as ts
from skipper.control.monarch import Actor, current_rank, endpoint
from skipper.torchstore.transport import Request, TransportType
from skipper.torchstore.transport import pipe as old_place
from skipper.torchstore.transport import types as new_place
from skipper.torchstore.utils import (
    assemble_tensor,
    color_print,
    get_local_tensor,
    get_slice_intersection,
    spawn_actors,
)
from tests.torchstore.actors import ShardedPeer

PATIENCE_S = 60


def block(offsets: tuple[int, ...], shape: tuple[int, ...], whole: tuple[int, ...] = (4, 6)) -> ts.TensorSlice:
    return ts.TensorSlice(offsets, (), whole, shape, ())


class PutGet(Actor):
    """As the scripts have it."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.rank = current_rank().rank
        os.environ["LOCAL_RANK"] = str(self.rank)

    @endpoint
    async def put(self) -> None:
        await ts.put(f"key_{self.rank}", torch.tensor([self.rank + 1] * 10))

    @endpoint
    async def get(self, offset: int = 0) -> torch.Tensor:
        got: torch.Tensor = await ts.get(f"key_{(self.rank + offset) % self.world_size}")
        return got


@pytest.mark.parametrize(
    ("number", "strategy"),
    [
        (2, ts.LocalRankStrategy(TransportType.MonarchRDMA)),
        (1, ts.HostStrategy(default_transport_type=TransportType.Gloo)),
        (1, None),
    ],
    ids=["local rank", "host", "none"],
)
async def test_actors_that_are_spawned_use_the_store_and_are_stopped_by_their_processes(
    number: int, strategy: ts.TorchStoreStrategy | None
) -> None:
    await ts.initialize(num_storage_volumes=number, strategy=strategy)
    putters: Any = await spawn_actors(number, PutGet, "actors", world_size=number)
    getters: Any = await spawn_actors(number, PutGet, "actors", world_size=number)
    try:
        await putters.put.call()
        for offset in (0, 1):
            for point, value in await getters.get.call(offset):
                assert set(value.tolist()) == {(point.rank + offset) % number + 1}
        more: Any = await spawn_actors(1, PutGet, "more", mesh=getters._proc_mesh, world_size=number)
        assert [point["gpus"] for point, _ in await more.get.call()] == list(range(number))
    finally:
        await putters._proc_mesh.stop()
        await getters._proc_mesh.stop()
        await ts.shutdown()


def test_a_transport_is_checked() -> None:
    wrong: Any = "gloo"
    with pytest.raises(TypeError, match=r"default_transport_type is a TransportType .*not 'gloo'"):
        ts.LocalRankStrategy(wrong)
    assert ts.ControllerStorageVolumes().default_transport_type is TransportType.Unset


def test_types_are_found_in_both_of_their_places() -> None:
    assert old_place.TensorSlice is new_place.TensorSlice is ts.TensorSlice
    assert old_place.Request is new_place.Request is Request


def test_requests_describe_tensors_slices_and_objects() -> None:
    tensor = torch.ones(2, 3)
    assert Request.from_any("k", tensor).tensor_val is tensor
    assert Request.from_any("k", tensor, block((1, 1), (2, 3))).tensor_slice == block((1, 1), (2, 3))
    assert Request.from_any("k", {"a": 1}).is_object
    with pytest.raises(ValueError, match="the slice has the shape"):
        Request.from_any("k", tensor, block((0, 0), (1, 1)))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from skipper.control import this_host

    procs = this_host().spawn_procs({"gpus": 2})
    mesh: Any = procs.spawn("ranks", Slices)
    mesh.join.call(f"file://{tmp_path_factory.mktemp('ranks')}/meet", 2).get(PATIENCE_S)
    yield mesh
    mesh.leave.call().get(PATIENCE_S)
    procs.stop().get(PATIENCE_S)


class Slices(ShardedPeer):
    """Says what a DTensor's request is."""

    @endpoint
    async def described(self) -> tuple[ts.TensorSlice | None, tuple[int, ...]]:
        from torch.distributed.tensor import Shard

        dtensor = self.distribute(torch.arange(12.0).reshape(4, 3), (2,), (Shard(0),))
        request = Request.from_any("k", dtensor)
        assert request.tensor_val is not None
        return request.tensor_slice, tuple(request.tensor_val.shape)


def test_a_dtensor_s_request_has_the_slice_of_its_rank(ranks: Any) -> None:
    for point, (part, shape) in ranks.described.call().get(PATIENCE_S).items():
        assert part == ts.TensorSlice((2 * point.rank, 0), (point.rank,), (4, 3), (2, 3), (2,))
        assert shape == (2, 3)


def test_a_local_tensor_is_a_view_of_its_part() -> None:
    whole = torch.arange(24).reshape(4, 6)
    part = get_local_tensor(whole, (2, 3), (1, 2))
    assert torch.equal(part, whole[1:3, 2:5])
    assert part.data_ptr() == whole[1:, 2:].data_ptr()
    with pytest.raises(ValueError, match="not a part of a tensor"):
        get_local_tensor(whole, (2, 3), (3, 2))
    with pytest.raises(ValueError, match="not a part of a tensor"):
        get_local_tensor(whole, (2,), (3,))


def test_parts_are_assembled_to_the_smallest_tensor_that_holds_them() -> None:
    whole = torch.arange(24).reshape(4, 6)
    parts = [whole[1:3, :2], whole[1:3, 1:4], whole[3:4, 0:4]]
    assert torch.equal(assemble_tensor(parts, (4, 6), [(1, 0), (1, 1), (3, 0)]), whole[1:4, :4])
    with pytest.raises(ts.CoverageError, match=r"offsets \(2,\), shape \(3,\)"):
        assemble_tensor([torch.ones(2), torch.ones(2)], (10,), [(0,), (5,)])
    with pytest.raises(ValueError, match="0 parts"):
        assemble_tensor([], (4,), [])


def test_slices_have_a_block_in_common_or_none() -> None:
    assert get_slice_intersection(block((0, 0), (2, 6)), block((1, 3), (3, 3))) == block((1, 3), (1, 3))
    assert get_slice_intersection(block((0, 0), (2, 6)), block((2, 0), (2, 6))) is None
    assert get_slice_intersection(block((0, 0), (2, 6)), block((0, 0), (2, 6), (5, 6))) is None


def test_lines_are_printed_in_colour(capsys: pytest.CaptureFixture[str]) -> None:
    color_print("fast", "y")
    assert capsys.readouterr().out == "\033[33mfast\033[0m\n"
    with pytest.raises(ValueError, match="colour"):
        color_print("fast", "sepia")


def test_logging_is_set_up_once_and_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", logging.WARNING)
    monkeypatch.setenv("TORCHSTORE_LOG_LEVEL", "debug")
    ts.init_logging()
    ts.init_logging()
    (handler,) = root.handlers
    assert isinstance(handler, logging.StreamHandler)
    assert handler.stream is sys.stdout
    assert root.level == logging.DEBUG
    monkeypatch.setenv("TORCHSTORE_LOG_LEVEL", "loud")
    with pytest.raises(ValueError, match="'LOUD'"):
        ts.init_logging()
