"""A ``torch.distributed`` process group across the actors of one mesh.

FSDP2 and tensor parallelism inside a mesh need one. Each mesh has its own: trainers and generators
never meet in a collective, so that neither waits for the other.
"""

from __future__ import annotations

import asyncio
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from skipper.control import Actor, concurrent_endpoint, context, endpoint
from skipper.control.cluster.hosts import device_of, own_address

LOOPBACK = "127.0.0.1"

INTERFACE = "GLOO_SOCKET_IFNAME"

ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
"""For ``spawn_procs(env=...)``: no process takes more than one core."""


def _store(host: str, port: int, size: int, timeout_s: float, **options: bool) -> Any:
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(host, port, size, timeout=timeout, **options)  # type: ignore[attr-defined]


class GroupMember(Actor):
    """Base of the actors that compute together; one of them is one rank of the group.

    Args:
        device: "cpu", where gloo carries the collectives; or "cuda", where NCCL does, and each rank has its own GPU.
    """

    def __init__(self, device: str = "cpu") -> None:
        torch.set_num_threads(1)
        point = context().actor_instance.rank
        self.rank: int = point.rank
        self.size: int = point.size
        if device == "cuda":
            torch.cuda.set_device(self.rank % torch.cuda.device_count())
        self.device = torch.device(device)
        self._rendezvous: Any = None
        self._is_open = asyncio.Event()
        self._missing = self.size - 1
        self._all_know = asyncio.Event()

    @endpoint
    async def address(self) -> str:
        """The IP of this rank's host."""
        return own_address()

    @endpoint
    async def open_rendezvous(self, timeout_s: float) -> int:
        """On the first rank: start the store through which the ranks find one another; its port."""
        # Port 0: the system picks a free one. The other ranks come later, so do not wait for them here.
        self._rendezvous = _store(LOOPBACK, 0, self.size, timeout_s, is_master=True, wait_for_workers=False)
        return int(self._rendezvous.port)

    @endpoint
    async def join(self, port: int, timeout_s: float, host: str = LOOPBACK) -> None:
        """Join the group, whose store is at ``host``; every rank must. ``timeout_s`` bounds each collective."""
        # Gloo talks over loopback only where all ranks are on one host, and else over the device that has its IP.
        device = device_of(LOOPBACK if host == LOOPBACK else own_address())
        if device is not None:
            os.environ[INTERFACE] = device
        store = self._rendezvous or _store(host, port, self.size, timeout_s)
        timeout = timedelta(seconds=timeout_s)
        backend = "gloo" if self.device.type == "cpu" else "nccl"
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=timeout)

    @concurrent_endpoint
    async def rendezvous(self) -> int:
        """On the first rank: the port of the store, once it is there."""
        await self._is_open.wait()
        self._missing -= 1
        if not self._missing:
            self._all_know.set()
        return int(self._rendezvous.port)

    async def meet(self, members: Any, timeout_s: float) -> None:
        """Join the group of ``members``, the mesh of all ranks, which are on one host, without anybody else's help."""
        port = 0
        if self.rank == 0:
            await self.open_rendezvous(timeout_s)
            self._is_open.set()
            if self._missing:
                await self._all_know.wait()  # joining blocks this thread, so nobody could ask it any more
        else:
            port = await members.flatten("ranks").slice(ranks=0).rendezvous.call_one()
        await self.join(port, timeout_s)

    def device_mesh(self, *shape: int) -> DeviceMesh:
        """A device mesh over the group, one axis with all ranks where no ``shape`` is given."""
        return init_device_mesh(self.device.type, shape or (self.size,))


async def connect(members: Any, *, timeout_s: float) -> None:
    """Make the actors of ``members``, a mesh of `GroupMember` on one host or several, one process group.

    Raises:
        ActorError: A rank could not join within ``timeout_s``.
        SupervisionError: One of them died.
    """
    hosts = await members.address.call()
    host = LOOPBACK if len(set(hosts)) == 1 else hosts[0]
    port = await members.flatten("ranks").slice(ranks=0).open_rendezvous.call_one(timeout_s)
    await members.join.call(port, timeout_s, host)
