"""The ranks behind `tests.torchstore.layouts`: DTensors over gloo, resharded by the store, by DTensor and by DCP."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard as TorchStridedShard

from skipper import torchstore as ts
from skipper.control import Actor, current_rank, endpoint
from skipper.torchstore.algebra.layout import Layout, Replicate, Shard, StridedShard
from skipper.torchstore.algebra.manifest import Mode
from tests.torchstore.oracle import bits, cuts_what_is_strided_twice, random_tensor

Case = tuple[torch.dtype, Layout, Layout]
"""A dtype, and the layouts of source and destination of one tensor."""


@dataclass(slots=True)
class Verdict:
    """What one rank found; lists hold a line for each pair that was not bit-equal to the oracle.

    Attributes:
        pairs: Resharded by the store, against DTensor's own cut of the whole tensor.
        nbytes: That this rank read.
        redistributed: Of these, how many DTensor redistributed itself (or gathered, between meshes).
        checkpointed: Of these, how many DCP saved in the one layout and loaded in the other.
    """

    pairs: int = 0
    nbytes: int = 0
    redistributed: int = 0
    checkpointed: int = 0
    wrong: list[str] = field(default_factory=list)
    not_as_redistributed: list[str] = field(default_factory=list)
    not_as_checkpointed: list[str] = field(default_factory=list)

    def add(self, other: "Verdict") -> None:
        """Sum up."""
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class LayoutRank(Actor):
    """One rank of a gloo process group."""

    def __init__(self) -> None:
        self.meshes: dict[tuple[int, ...], DeviceMesh] = {}

    @endpoint
    async def join(self, port: int, world_size: int) -> None:
        """Make the process group, in processes that have none."""
        torch.set_num_threads(1)
        timeout = timedelta(seconds=120)
        store = dist.TCPStore("127.0.0.1", port, world_size, is_master=False, timeout=timeout)
        dist.init_process_group("gloo", store=store, rank=current_rank().rank, world_size=world_size, timeout=timeout)

    @endpoint
    async def leave(self) -> None:
        dist.destroy_process_group()

    @endpoint
    async def reshard(self, key: str, mode: Mode, cases: list[Case], checkpoint: str | None) -> Verdict:
        """Put every case's tensor in its first layout, get it in its second one.

        Args:
            key: Of the state dict that holds all of them.
            mode: Of the put.
            cases: One tensor each.
            checkpoint: A folder that DCP may write to; None: leave DCP out.
        """
        whole = {
            str(number): random_tensor(dtype, layout.global_shape, number)
            for number, (dtype, layout, _) in enumerate(cases)
        }
        sources = {name: self._distribute(full, cases[int(name)][1]) for name, full in whole.items()}
        expected = {name: self._distribute(full, cases[int(name)][2]) for name, full in whole.items()}
        targets = {name: _blank(value) for name, value in expected.items()}
        await ts.put_state_dict(sources, key, mode=mode)
        dist.barrier()  # every rank has put: the version is whole
        await ts.get_state_dict(key, targets, version="latest")
        record = ts.last_sync()
        assert record is not None
        verdict = Verdict(len(cases), record.nbytes, wrong=_unequal(targets, expected, cases))
        dist.barrier()  # every rank has read
        for name, (_, source, target) in zip(whole, cases, strict=True):
            if not (_is_canonical(source) and _is_canonical(target)):
                continue
            verdict.redistributed += 1
            if source.mesh_shape == target.mesh_shape:
                theirs = sources[name].redistribute(placements=_placements(target)).to_local()
            else:
                theirs = self._distribute(sources[name].full_tensor(), target).to_local()
            if not _same(targets[name].to_local(), theirs):
                verdict.not_as_redistributed.append(f"{source} -> {target}")
        if checkpoint is not None:
            self._checkpoint(checkpoint, cases, sources, targets, verdict)
        return verdict

    def _checkpoint(
        self,
        folder: str,
        cases: list[Case],
        sources: dict[str, DTensor],
        targets: dict[str, DTensor],
        verdict: Verdict,
    ) -> None:
        """Save what DCP can in one layout, load it in the other, and compare with what the store has read."""
        chosen = [name for name in sources if all(map(_is_saved_by_dcp, cases[int(name)][1:]))]
        loaded = {name: _blank(targets[name]) for name in chosen}
        dcp.save({name: sources[name] for name in chosen}, checkpoint_id=folder)
        dcp.load(loaded, checkpoint_id=folder)
        verdict.checkpointed += len(chosen)
        verdict.not_as_checkpointed += _unequal(targets, loaded, cases)

    def _distribute(self, full: torch.Tensor, layout: Layout) -> DTensor:
        shape = layout.mesh_shape
        if shape not in self.meshes:
            self.meshes[shape] = init_device_mesh("cpu", shape)
        return distribute_tensor(full, self.meshes[shape], _placements(layout), src_data_rank=None)


def _placements(layout: Layout) -> list[Placement]:
    return [
        TorchReplicate()
        if isinstance(placement, Replicate)
        else TorchShard(placement.dim)
        if isinstance(placement, Shard)
        else TorchStridedShard(placement.dim, split_factor=placement.split_factor)
        for placement in layout.placements
    ]


def _is_canonical(layout: Layout) -> bool:
    """Whether strided shards say no more than that a later axis has cut their dim before.

    Such layouts come out of FSDP over tensor parallelism. Of others DTensor's `redistribute` makes something else than
    its own `distribute_tensor` does, so that it cannot be an oracle.
    """
    for axis, placement in enumerate(layout.placements):
        if isinstance(placement, StridedShard):
            later = 1
            for size, other in zip(layout.mesh_shape[axis + 1 :], layout.placements[axis + 1 :], strict=True):
                if other == StridedShard(placement.dim, getattr(other, "split_factor", 0)):
                    return False
                later *= size if other == Shard(placement.dim) else 1
            if later == 1 or placement.split_factor != later or layout.global_shape[placement.dim] % later:
                return False
    return True


def _is_saved_by_dcp(layout: Layout) -> bool:
    """Whether no rank holds more than one box, since DCP writes one chunk for each shard; that of 2.8 takes fewer."""
    if not (cuts_what_is_strided_twice() or _is_canonical(layout)):
        return False
    return all(len(layout.pieces(at)) <= 1 for at in layout.coordinates())


def _blank(value: DTensor) -> DTensor:
    """A DTensor like another, with other bytes in it."""
    local = value.to_local()
    fresh = torch.zeros_like(local)
    if fresh.numel():
        fresh.view(-1).view(torch.uint8).fill_(0xA5)
    mesh, placements = value.device_mesh, value.placements
    return DTensor.from_local(fresh, mesh, placements, run_check=False, shape=value.shape, stride=value.stride())


def _unequal(ours: dict[str, DTensor], theirs: dict[str, DTensor], cases: Sequence[Case]) -> list[str]:
    return [
        f"rank {dist.get_rank()}: {cases[int(name)]}"
        for name, value in theirs.items()
        if not _same(ours[name].to_local(), value.to_local())
    ]


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and torch.equal(bits(left), bits(right))


def environment() -> dict[str, Any]:
    """For the ranks: gloo over loopback, one thread each, and no word from DTensor about slow collectives."""
    return {
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TORCH_LOGS": "-all",
    } | {name: value for name, value in os.environ.items() if name == "TMPDIR"}
