"""What a publication says about its tensors; DTensors of torch's "fake" process group, so that no data moves."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from skipper.torchstore.algebra.manifest import MeshPosition
from skipper.torchstore.tensors.packing import pack
from tests.torchstore.tensors.test_local_tensors import rank_of


def distribute(local: torch.Tensor, shape: tuple[int, ...], *placements: Shard | Replicate) -> DTensor:
    mesh = init_device_mesh("cpu", shape)
    return DTensor.from_local(local, mesh, placements, run_check=False)


def test_an_arena_holds_the_tensors_one_after_the_other_on_cache_lines() -> None:
    packed = pack(
        "k", "state_dict", "snapshot", {"a": torch.zeros(3, 3), "b": torch.zeros(5).bool(), "c": torch.zeros(0)}
    )
    items = packed.manifest.tensors
    assert [items[name].offset for name in "abc"] == [0, 64, 128]
    assert (items["a"].strides, items["b"].strides) == ((12, 4), (1,))
    assert packed.nbytes == 128
    assert items["c"].pieces == ()


def test_a_value_without_shards_stands_alone() -> None:
    assert pack("k", "value", "snapshot", {"": torch.zeros(3)}).manifest.part == MeshPosition()
    with rank_of(1, 2):
        replicated = distribute(torch.zeros(3), (2,), Replicate())
        packed = pack("k", "value", "snapshot", {"": replicated})
    assert packed.manifest.part == MeshPosition()
    assert packed.manifest.tensors[""].pieces


def test_a_sharded_value_belongs_to_a_rank_of_its_largest_mesh() -> None:
    with rank_of(3, 4):
        tensors = {
            "rows": distribute(torch.zeros(2, 4), (2, 2), Shard(0), Replicate()),
            "columns": distribute(torch.zeros(4, 2), (2, 2), Replicate(), Shard(1)),
            "plain": torch.zeros(3),
        }
        part = pack("k", "state_dict", "snapshot", tensors).manifest.part
    assert part == MeshPosition((1, 1), (2, 2), (0, 1))


def test_a_snapshot_stores_one_copy_of_replicas_and_a_direct_version_offers_all() -> None:
    held: dict[tuple[str, int], int] = {}
    for rank in range(4):
        with rank_of(rank, 4):
            tensors = {"w": distribute(torch.zeros(2, 4), (2, 2), Replicate(), Shard(0))}
            for mode in ("snapshot", "direct"):
                packed = pack("k", "state_dict", mode, tensors)  # type: ignore[arg-type]
                held[mode, rank] = len(packed.manifest.tensors["w"].pieces)
                assert bool(packed.nbytes) == (mode == "snapshot" and rank < 2)
    assert [held["snapshot", rank] for rank in range(4)] == [1, 1, 0, 0]
    assert [held["direct", rank] for rank in range(4)] == [1, 1, 1, 1]


def test_direct_mode_registers_each_storage_once_and_finds_tensors_in_it() -> None:
    base = torch.zeros(10, 10)
    packed = pack(
        "k", "state_dict", "direct", {"all": base, "tied": base, "part": base[2:, 5:].t(), "other": torch.zeros(1)}
    )
    items = packed.manifest.tensors
    assert len(packed.storages) == 2
    assert {name: item.buffer for name, item in items.items()} == {"all": 0, "tied": 0, "part": 0, "other": 1}
    assert items["part"].offset == (2 * 10 + 5) * 4
    assert items["part"].strides == (4, 40)
    assert packed.nbytes == 0


def test_equal_layouts_have_equal_manifests_whatever_the_memory() -> None:
    one, other = (pack("k", "state_dict", "snapshot", {"a": torch.rand(3, 3)}).manifest for _ in range(2))
    assert one.id == other.id
    assert one.id != pack("k", "state_dict", "snapshot", {"a": torch.rand(3, 4)}).manifest.id
    assert one.id != pack("k", "state_dict", "snapshot", {"b": torch.rand(3, 3)}).manifest.id
