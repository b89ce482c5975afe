"""`describe` on real DTensors. Torch's "fake" process group gives each its rank and mesh; no data moves."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from skipper.torchstore.algebra.layout import Box, Piece
from skipper.torchstore.algebra.slices import TensorSlice
from skipper.torchstore.errors import KindMismatchError, LayoutMismatchError, UnsupportedPlacementError
from skipper.torchstore.tensors.local_tensors import (
    BorrowedTensor,
    check_destination,
    describe,
    describe_slice,
    fingerprint,
    storage_of,
)


@contextmanager
def rank_of(rank: int, world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_a_plain_tensor_is_the_whole_of_itself() -> None:
    tensor = torch.zeros(2, 3, requires_grad=True)
    local = describe(tensor, key="w")
    assert local.pieces == (Piece(Box((0, 0), (2, 3)), (0, 0)),)
    assert local.tensor.data_ptr() == tensor.data_ptr()
    assert not local.tensor.requires_grad


@pytest.mark.parametrize(("rank", "rows", "start"), [(0, 2, 0), (1, 2, 2), (2, 1, 4), (3, 0, 5)])
def test_a_dtensor_is_its_uneven_or_empty_shard(rank: int, rows: int, start: int) -> None:
    with rank_of(rank, 4):
        mesh = init_device_mesh("cpu", (4,))
        local = torch.zeros(rows, 3)
        value = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size((5, 3)), stride=(3, 1))
        described = describe(value, key="w")
    assert described.global_shape == (5, 3)
    assert described.coordinate == (rank,)
    assert described.pieces == ((Piece(Box((start, 0), (rows, 3)), (0, 0)),) if rows else ())


def test_a_strided_shard_is_several_pieces() -> None:
    with rank_of(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        value = DTensor.from_local(
            torch.zeros(4),
            mesh,
            [_StridedShard(0, split_factor=2)],
            run_check=False,
            shape=torch.Size((8,)),
            stride=(1,),
        )
        pieces = describe(value, key="w").pieces
    assert pieces == (Piece(Box((2,), (2,)), (0,)), Piece(Box((6,), (2,)), (2,)))


def test_a_negative_dim_counts_from_the_end() -> None:
    with rank_of(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        value = DTensor.from_local(torch.zeros(4, 2), mesh, [Shard(-1)], run_check=False)
        assert describe(value, key="w").pieces == (Piece(Box((0, 0), (4, 2)), (0, 0)),)


def test_partial_is_refused_with_the_key_named() -> None:
    with rank_of(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        value = DTensor.from_local(torch.zeros(4), mesh, [Partial()], run_check=False)
        with pytest.raises(UnsupportedPlacementError, match=r"'layer\.weight'.*redistribute"):
            describe(value, key="layer.weight")


def test_a_local_tensor_that_its_placements_do_not_explain_is_refused() -> None:
    with rank_of(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        value = DTensor.from_local(
            torch.zeros(5), mesh, [Shard(0)], run_check=False, shape=torch.Size((8,)), stride=(1,)
        )
        with pytest.raises(LayoutMismatchError, match=r"has shape \(5,\)"):
            describe(value, key="w")


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2, 2).to_sparse(),
        lambda: torch.zeros(2, device="meta"),
        lambda: torch.zeros(2, dtype=torch.complex64).conj(),
    ],
)
def test_tensors_without_plain_memory_are_refused(make: Callable[[], torch.Tensor]) -> None:
    with pytest.raises(KindMismatchError):
        describe(make(), key="w")


def test_a_slice_describes_where_a_part_goes() -> None:
    spec = TensorSlice(offsets=(1, 2), coordinates=(), global_shape=(4, 6), local_shape=(2, 3), mesh_shape=())
    assert describe_slice(torch.zeros(2, 3), spec, key="w").pieces == (Piece(Box((1, 2), (2, 3)), (0, 0)),)
    with pytest.raises(LayoutMismatchError, match="the given tensor"):
        describe_slice(torch.zeros(3, 3), spec, key="w")


def test_an_impossible_slice_is_refused() -> None:
    with pytest.raises(ValueError, match="reaches out"):
        TensorSlice(offsets=(3,), coordinates=(), global_shape=(4,), local_shape=(2,), mesh_shape=())
    with pytest.raises(ValueError, match="for each dim"):
        TensorSlice(offsets=(3,), coordinates=(), global_shape=(4, 4), local_shape=(2,), mesh_shape=())


def test_an_expanded_destination_is_refused() -> None:
    with pytest.raises(LayoutMismatchError, match="share memory"):
        check_destination(torch.zeros(1, 3).expand(2, 3), "w")


def test_storage_covers_all_memory_behind_a_view() -> None:
    base = torch.arange(12, dtype=torch.int32)
    storage = storage_of(base.view(3, 4)[1:, 1:])
    assert storage.nbytes == base.nbytes
    assert storage.data_ptr() == base.data_ptr()


def test_the_fingerprint_follows_memory_and_layout_and_not_python_objects() -> None:
    base = torch.zeros(4, 4)
    mark = fingerprint({"w": base, "step": 1})
    same = fingerprint({"w": base.detach(), "step": 2})
    assert same == mark
    assert {mark: "found"}[same] == "found"
    for other in ({"w": base.t()}, {"w": base.clone()}, {"w": base[:2]}, {"w": base.view(torch.int32)}):
        assert fingerprint({**other, "step": 1}) != mark


def test_the_fingerprint_tells_placements_apart() -> None:
    with rank_of(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        local = torch.zeros(4, 4)
        values = [
            DTensor.from_local(local, mesh, [placement], run_check=False)
            for placement in (Shard(0), Shard(1), Replicate(), Shard(0))
        ]
        marks = [fingerprint({"w": value}) for value in values]
    assert marks[0] == marks[3]
    assert hash(marks[0]) == hash(marks[3])
    assert len(set(map(repr, marks))) == 3


def test_a_borrowed_dtensor_is_the_same_over_the_same_memory_until_that_is_freed() -> None:
    with rank_of(1, 4):
        mesh = init_device_mesh("cpu", (4,))
        local = torch.arange(6.0).reshape(2, 3)
        value = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size((5, 3)), stride=(3, 1))
        described = describe(value, key="w")
        borrowed = BorrowedTensor(value)
        del value
        found = borrowed.tensor()
        assert found is not None
        assert describe(found, key="w").pieces == described.pieces
        assert describe(found, key="w").tensor.data_ptr() == local.data_ptr()
        del local, described, found
        gc.collect()
        assert borrowed.tensor() is None
