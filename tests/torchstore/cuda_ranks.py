"""Actors whose tensors lie on a GPU: ranks of a group that may share one, and a rank that trains with FSDP2."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from skipper import torchstore as ts
from skipper.control import Actor, current_rank, endpoint
from tests.gpu.kernels import occupy

GROUP_S = 60.0


def content(seed: int) -> dict[str, torch.Tensor]:
    """A small model in memory of the host; a tensor is large enough for several threads and workers."""
    chance = torch.Generator().manual_seed(seed)
    shapes = {"large": (1024, 4096), "small": (4, 8), "half": (64, 32)}
    tensors = {name: torch.rand(shape, generator=chance) for name, shape in shapes.items()}
    return {**tensors, "half": tensors["half"].bfloat16()}


class CudaRank(Actor):
    """One of ``size`` ranks; each has its part of every tensor, cut along ``dim``.

    Gloo carries the group, since NCCL refuses ranks that share a GPU; nothing that is tested needs a collective.
    """

    def __init__(self, address: str, size: int, dim: int) -> None:
        self._rank, self._size, self._dim = current_rank().rank, size, dim
        torch.cuda.set_device(self._rank % torch.cuda.device_count())
        dist.init_process_group("gloo", init_method=address, rank=self._rank, world_size=size)
        self._mesh = init_device_mesh("cuda", (size,))
        self._held = {name: self._sharded(torch.zeros_like(full)) for name, full in content(0).items()}

    @endpoint
    async def publish(self, seed: int, key: str, mode: Any, busy: bool = False, **options: Any) -> int:
        """Put `content`; ``busy``: while a stream that is not the default one still makes it."""
        stream = torch.cuda.Stream() if busy else torch.cuda.current_stream()
        with torch.cuda.stream(stream):
            if busy:
                occupy()
            for name, full in content(seed).items():
                self._held[name].to_local().copy_(self._part(full))
            return await ts.put_state_dict(self._held, key, mode=mode, **options)

    @endpoint
    async def pull(self, seed: int, key: str, busy: bool = False, **options: Any) -> list[str]:
        """Get in place; returns what is not as `content`, or what a stream still read of the old and did not find."""
        stream = torch.cuda.Stream() if busy else torch.cuda.current_stream()
        before = {name: tensor.to_local().clone() for name, tensor in self._held.items()}
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            if busy:
                occupy()
            late = {name: tensor.to_local().clone() for name, tensor in self._held.items()}
            await ts.get_state_dict(key, self._held, **options)
            now = {name: tensor.to_local().clone() for name, tensor in self._held.items()}
        torch.cuda.synchronize()
        wrong = [f"{name} before" for name, old in before.items() if not torch.equal(old, late[name])]
        for name, full in content(seed).items():
            if not torch.equal(now[name].cpu(), self._part(full)):
                wrong.append(name)
        return wrong

    @endpoint
    async def fence(self, key: str) -> None:
        """Wait for readers, as before an optimizer's step."""
        await ts.fence(key)

    def _part(self, full: torch.Tensor) -> torch.Tensor:
        return full.chunk(self._size, self._dim)[self._rank].contiguous()

    def _sharded(self, full: torch.Tensor) -> DTensor:
        local = self._part(full).to("cuda")
        placements = [Shard(self._dim)]
        return DTensor.from_local(
            local, self._mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
        )


class FsdpRank(Actor):
    """The only rank of an FSDP2 group over NCCL."""

    def __init__(self, address: str) -> None:
        torch.cuda.set_device(0)
        if not dist.is_initialized():  # an earlier test may have done so in this process
            dist.init_process_group("nccl", init_method=address, rank=0, world_size=1)
        torch.manual_seed(3)
        self._model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).to("cuda")
        fully_shard(self._model, mesh=init_device_mesh("cuda", (1,)))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.1)

    @endpoint
    async def step_and_publish(self, key: str, mode: Any) -> dict[str, torch.Tensor]:
        """Train a step, put what came of it while its kernels may still run; the whole weights, on the host."""
        await self._step()
        await ts.put_state_dict(self._model.state_dict(), key, mode=mode)
        return self._whole()

    @endpoint
    async def step_and_pull(self, key: str) -> dict[str, torch.Tensor]:
        """Train a step, then get what was put over its result; the whole weights, on the host."""
        await ts.fence(key)
        await self._step()
        await ts.get_state_dict(key, self._model.state_dict())
        return self._whole()

    async def _step(self) -> None:
        self._model(torch.ones(8, 64, device="cuda")).square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _whole(self) -> dict[str, torch.Tensor]:
        state: Mapping[str, Any] = self._model.state_dict()
        return {name: value.full_tensor().cpu() for name, value in state.items()}
