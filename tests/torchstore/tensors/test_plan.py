"""Compiled reads; that the right bytes come is tested in test_reshard."""

import torch

from skipper import dataplane
from skipper.dataplane import RDMABuffer
from skipper.torchstore.algebra.layout import Layout, Shard
from skipper.torchstore.algebra.manifest import Binding, Manifest, MeshPosition, TensorItem
from skipper.torchstore.tensors.local_tensors import LocalTensor
from skipper.torchstore.tensors.plan import Source, compile_read

ROWS = Layout((8,), (4,), (Shard(0),))


def source(rank: int) -> Source:
    """A publisher of two bytes, whose seal says the number of its rank and one."""
    item = TensorItem("torch.uint8", (8,), ROWS.pieces((rank,)), 0, 0, (1,), 1)
    manifest = Manifest.of("state_dict", MeshPosition((rank,), (4,), (0,)), {"w": item}, (), {})
    memory, seal = dataplane.empty((2,), torch.uint8).fill_(rank), dataplane.empty((1,), torch.int64).fill_(rank + 1)
    return Source(manifest, Binding(f"memory {rank}", "direct", "", (RDMABuffer(memory),), RDMABuffer(seal)))


async def test_the_seals_of_those_alone_are_read_whose_bytes_are() -> None:
    into = torch.zeros(4, dtype=torch.uint8)
    target = LocalTensor(into, (8,), Layout((8,), (2,), (Shard(0),)).pieces((1,)))
    plan = compile_read("key", [source(rank) for rank in range(4)], {"w": target})
    assert await plan.seals.read(10) == {2: 3, 3: 4}
    await plan.action.submit()
    assert into.tolist() == [2, 2, 3, 3]
    assert plan.of_source == ((0, 0), (0, 0), (2, 1), (2, 1))
