"""The actors of a run: trainers that publish, generators that read, and one client that puts and gets small values."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from skipper import dataplane
from skipper import torchstore as ts
from skipper.benchmarks.weight_sync.model import Tensors, fsdp, tensor_parallel
from skipper.control import Actor, ActorMesh, current_rank, endpoint
from skipper.torchstore.algebra import layout

__all__ = ["DTYPE", "Client", "Cut", "EchoActor", "Generator", "Pull", "Trainer"]

Cut = Literal["fsdp", "tensor_parallel", "whole"]

DTYPE = torch.bfloat16

_GROUP_TIMEOUT = timedelta(seconds=60)

_BLOCK = 20  # calls in a row before another kind has its turn


@dataclass(frozen=True, slots=True)
class Pull:
    """One read of a reader: when it ended (``time.perf_counter`` of this host), and its record."""

    end_s: float
    record: ts.SyncRecord


class Holder(Actor):
    """One rank's part of a model.

    Args:
        model: Which tensors.
        cut: How they are sharded over the ranks; "whole" gives every rank all of them, as plain tensors.
        ranks: How many ranks hold the model together; those after them hold it once more.
        port: Port of the job's TCPStore on loopback, where the ranks of ``name`` meet.
        name: Name of the ranks of this side.
        shared: Whether memory of the host is made so that other processes can map it.
        device: "cpu", or "cuda": the ranks take the GPUs in turn, and may share them.
        backend: Backend of the data plane, or "auto".
    """

    def __init__(
        self,
        model: Tensors,
        cut: Cut,
        ranks: int,
        port: int,
        name: str,
        shared: bool,
        device: str,
        backend: str = "auto",
    ) -> None:
        torch.set_num_threads(1)
        dataplane.configure(backend=backend)
        point = current_rank()
        if device == "cuda":
            torch.cuda.set_device(point.rank % torch.cuda.device_count())
        self._place = (point.rank, point.size)
        group, rank = divmod(point.rank, ranks)
        self._mesh = _device_mesh(rank, ranks, port, f"{name}{group}", device) if cut != "whole" else None
        layouts = (tensor_parallel if cut == "tensor_parallel" else fsdp)(model.shapes(), ranks)
        self.weights: dict[str, torch.Tensor] = {}
        for name_, cut_ in layouts.items():
            shape = cut_.global_shape if self._mesh is None else cut_.local_shape((rank,))
            mapped = shared and device == "cpu"
            local = dataplane.empty(shape, DTYPE) if mapped else torch.empty(shape, dtype=DTYPE, device=device)
            local.zero_()
            self.weights[name_] = local if self._mesh is None else _dtensor(local, cut_, self._mesh)

    @endpoint
    async def nbytes(self) -> int:
        """Bytes that this rank holds."""
        return sum(_local(tensor).nbytes for tensor in self.weights.values())

    @endpoint
    async def fill(self, number: int) -> None:
        """Set every element to ``number``, which bfloat16 represents exactly up to 256."""
        for tensor in self.weights.values():
            _local(tensor).fill_(number)

    @endpoint
    async def wrong(self, number: int) -> int:
        """The number of elements that are not ``number``."""
        return sum(int((_local(tensor) != number).sum()) for tensor in self.weights.values())


class Trainer(Holder):
    """Publishes its part."""

    @endpoint
    async def publish(self, key: str, mode: Any) -> float:
        """Publish the next version; returns when that began."""
        begin_s = time.perf_counter()
        # The ranks of this mesh: the process group of this process may have more.
        await ts.put_state_dict(self.weights, key, mode=mode, publisher=self._place)
        return begin_s

    @endpoint
    async def fence(self, key: str) -> None:
        """Wait until nobody reads, as before an optimizer's step."""
        await ts.fence(key)


class Generator(Holder):
    """Reads its part, in place."""

    @endpoint
    async def pull(self, key: str, newer_than: int) -> Pull:
        """Read the next version."""
        await ts.get_state_dict(key, self.weights, version=("newer_than", newer_than))
        end_s, record = time.perf_counter(), ts.last_sync()
        if record is None:
            raise RuntimeError("a read leaves a record")
        return Pull(end_s, record)


class EchoActor(Actor):
    """The reference for a store's call: a call that does nothing, to the process of the store's controller."""

    @endpoint
    async def echo(self, payload: bytes) -> bytes:
        """The payload again."""
        return payload


class Client(Actor):
    """Puts and gets 64 bytes."""

    @endpoint
    async def measure(self, echo: ActorMesh[EchoActor], rounds: int) -> dict[str, list[float]]:
        """Put, get and call in turns; microseconds of each."""
        value, payload = torch.zeros(16), bytes(64)
        contestants: dict[str, Callable[[], Awaitable[object]]] = {
            "put": lambda: ts.put("small", value),
            "get": lambda: ts.get("small"),
            "call_one": lambda: echo.echo.call_one(payload),
        }
        taken_us: dict[str, list[float]] = {name: [] for name in contestants}
        for turn in range(rounds + 1):
            for name, run in contestants.items():
                await run()  # brings its own code and data back into the caches
                for _ in range(_BLOCK):
                    begin = time.perf_counter()
                    await run()
                    if turn:  # the first round warms up
                        taken_us[name].append((time.perf_counter() - begin) * 1e6)
        return taken_us


def _device_mesh(rank: int, size: int, port: int, name: str, device: str) -> DeviceMesh:
    if not dist.is_initialized():  # an earlier part of the run may have done so
        store = dist.PrefixStore(name, dist.TCPStore("127.0.0.1", port, timeout=_GROUP_TIMEOUT))  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_GROUP_TIMEOUT)
    # No collective runs over it, so gloo will do for GPUs, too: NCCL refuses ranks that share one.
    return init_device_mesh(device, (size,))


def _dtensor(local: torch.Tensor, cut: layout.Layout, mesh: DeviceMesh) -> DTensor:
    placements = [Shard(p.dim) if isinstance(p, layout.Shard) else Replicate() for p in cut.placements]
    shape, stride = cut.global_shape, layout.contiguous_strides(cut.global_shape)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
