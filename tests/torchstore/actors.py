"""Actors that the store's tests run in real processes."""

import importlib
import inspect
import os
import signal
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from skipper import dataplane
from skipper import torchstore as ts
from skipper.control import Actor, ActorMesh, MeshFailure, current_rank, endpoint, this_host
from skipper.torchstore.protocol.messages import Selector
from skipper.torchstore.support.records import Cost
from skipper.torchstore.tensors.packing import pack
from tests.torchstore import fused
from tests.torchstore.oracle import bits, random_tensor


class Peer(Actor):
    """Another process of the job that uses the store."""

    def __init__(self) -> None:
        self.held: dict[str, Any] = {}

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def put(self, key: str, value: Any, store_name: str = "default") -> None:
        await ts.put(key, value, store_name)

    @endpoint
    async def get(self, key: str, store_name: str = "default") -> Any:
        return await ts.get(key, store_name=store_name)

    @endpoint
    async def put_many(self, key: str, number: int, size: int) -> None:
        """Put tensors of ``size`` elements that say 1, 2, ... ``number``."""
        for element in range(1, number + 1):
            await ts.put(key, torch.full((size,), float(element)))

    @endpoint
    async def put_batch(self, prefix: str, number: int, seed: int) -> None:
        """Put a batch of tensors of 16 KiB that all say ``seed``."""
        await ts.put_batch({f"{prefix}{n}": torch.full((4096,), float(seed)) for n in range(number)})

    @endpoint
    async def get_batch(self, prefix: str, number: int) -> set[float]:
        """The distinct elements of such a batch."""
        found = await ts.get_batch([f"{prefix}{n}" for n in range(number)])
        return {element for tensor in found.values() for element in tensor.unique().tolist()}

    @endpoint
    async def poll(self, key: str, last: float) -> list[float]:
        """What a tensor's elements say, read again and again until that is ``last``; each time one number only."""
        seen = [0.0]
        while seen[-1] != last:
            (number,) = set((await ts.get(key)).tolist())
            seen.append(number)
        return seen

    @endpoint
    async def forget(self, key: str) -> None:
        await ts.delete(key)

    @endpoint
    async def put_state_dict(self, key: str, seed: int, mode: Any, version: int | None = None, **options: Any) -> int:
        """Publish a model whose elements all say ``seed``; the same tensors every time."""
        model = self.held.setdefault(key, make_model(share=mode == "direct"))
        fill_model(model, seed)
        return await ts.put_state_dict(model, key, mode=mode, version=version, **options)

    @endpoint
    async def get_state_dict(
        self, key: str, version: Any = "latest", timeout: float = 20.0, **options: Any
    ) -> set[int]:
        """The distinct elements of what is read, into the same tensors every time."""
        model = self.held.setdefault(f"into {key}", make_model(share=False))
        await ts.get_state_dict(key, model, version=version, timeout=timeout, **options)
        return model_values(model)

    @endpoint
    async def publish_many(self, key: str, number: int, mode: Any) -> int:
        """Publish versions 1 to ``number``, each filled with its number; returns the last one."""
        model = make_model(share=mode == "direct")
        version = 0
        for seed in range(1, number + 1):
            if mode == "direct":
                await ts.fence(key)
            fill_model(model, seed)
            version = await ts.put_state_dict(model, key, mode=mode, version=seed)
        return version

    @endpoint
    async def read_many(self, key: str, last: int) -> list[int]:
        """Read new versions until ``last``; each must be of one number throughout, its own."""
        model, seen = make_model(share=False), [0]
        while seen[-1] < last:
            await ts.get_state_dict(key, model, version=("newer_than", seen[-1]), timeout=20)
            record = ts.last_sync()
            assert record is not None
            assert model_values(model) == {record.version}
            seen.append(record.version)
        return seen

    @endpoint
    async def delete(self, key: str) -> None:
        await ts.delete(key)

    @endpoint
    async def fence(self, key: str, timeout: float = 20.0) -> None:
        await ts.fence(key, timeout=timeout)

    @endpoint
    async def scribble(self, key: str, seed: int) -> None:
        """Change a published model without telling anybody."""
        fill_model(self.held[key], seed)

    @endpoint
    async def last_sync(self) -> ts.SyncRecord | None:
        return ts.last_sync()

    @endpoint
    async def put_fake_shard(self, key: str, rank: int, world_size: int, seed: int, **options: Any) -> int:
        """Put one rank's rows of a DTensor, without a process group that would miss a dead rank."""
        if not dist.is_initialized():
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        mesh = init_device_mesh("cpu", (world_size,))
        local = torch.full((300, 50), seed, dtype=torch.float32)
        return await ts.put_state_dict({"w": DTensor.from_local(local, mesh, [Shard(0)])}, key, **options)

    @endpoint
    async def write_without_publishing(self, key: str) -> None:
        """Go half of the way of a snapshot put: the bytes are in the volume, nobody has been told."""
        ts.reset_client()
        publisher = (await ts.client()).publisher
        packed = pack(key, "state_dict", "snapshot", self.held[key])
        await publisher.snapshots.copy(key, packed, 1, Cost("put", 0.0), 20.0)

    @endpoint
    async def lease(self, key: str) -> None:
        """Become a reader that does not finish."""
        ts.reset_client()  # what is below the public functions does not notice that the store is another one
        client = await ts.client()
        self.held["lease"] = await client.remote.acquire(key, Selector(), (), 20.0)

    @endpoint
    async def end_lease(self) -> None:
        """Finish after all."""
        (await ts.client()).remote.release((self.held.pop("lease"),))


class Mortal(Peer):
    """A peer that kills its own process at a step of its choice."""

    @endpoint
    async def die(self, when: str, step: str) -> None:
        """Be killed when the process gets to a step, or leaves it.

        Args:
            when: "before" or "after".
            step: What the step is done by: ``module:function`` or ``module:Class.method``.
        """
        place, _, path = step.partition(":")
        *owners, name = path.split(".")
        owner: Any = importlib.import_module(place)
        for part in owners:
            owner = getattr(owner, part)
        done = getattr(owner, name)

        def end() -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        async def asynchronously(*args: Any, **kwargs: Any) -> Any:
            if when == "before":
                end()
            await done(*args, **kwargs)
            end()

        def at_once(*args: Any, **kwargs: Any) -> Any:
            if when == "before":
                end()
            done(*args, **kwargs)
            end()

        setattr(owner, name, asynchronously if inspect.iscoroutinefunction(done) else at_once)


class Keeper(Actor):
    """Owns processes that are made to be killed, and takes their deaths calmly."""

    def __init__(self, number: int = 1) -> None:
        self.procs = this_host().spawn_procs(per_host={"gpus": number})

    def __supervise__(self, failure: MeshFailure) -> bool:
        return True

    @endpoint
    async def spawn(self) -> ActorMesh[Mortal]:
        return self.procs.spawn("victim", Mortal)


def make_model(*, share: bool) -> dict[str, torch.Tensor]:
    """A few tensors, some MiB together."""
    module = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 1024, bias=False))
    if share:
        ts.share_memory_(module)
    return dict(module.state_dict())


def fill_model(model: Mapping[str, torch.Tensor], seed: int) -> None:
    """Make every element say ``seed``."""
    for tensor in model.values():
        tensor.fill_(seed)


def model_values(model: Mapping[str, torch.Tensor]) -> set[int]:
    """The distinct elements of a model, whole numbers that may have been quantized on their way."""
    return {round(value) for tensor in model.values() for value in tensor.unique().tolist()}


class ShardedPeer(Actor):
    """One rank of a gloo process group, which holds DTensors."""

    @endpoint
    async def join(self, address: str, world_size: int) -> None:
        self.rank = current_rank().rank
        dist.init_process_group("gloo", init_method=address, rank=self.rank, world_size=world_size)
        self.meshes: dict[tuple[int, ...], DeviceMesh] = {}

    @endpoint
    async def leave(self) -> None:
        dist.destroy_process_group()

    def mesh(self, shape: tuple[int, ...]) -> DeviceMesh:
        if shape not in self.meshes:
            self.meshes[shape] = init_device_mesh("cpu", shape)
        return self.meshes[shape]

    def distribute(self, full: torch.Tensor, shape: tuple[int, ...], placements: tuple[Placement, ...]) -> DTensor:
        return distribute_tensor(full, self.mesh(shape), placements, src_data_rank=None)

    @endpoint
    async def reshard(
        self,
        key: str,
        mode: Any,
        cases: list[tuple[torch.dtype, tuple[int, ...], tuple[Any, ...], tuple[Any, ...]]],
    ) -> int:
        """Put DTensors in one layout, get them in another, compare with the full tensor cut likewise.

        Each case is (dtype, global shape, (mesh, placements) at the source, the same at the destination).
        """
        sources: dict[str, DTensor] = {}
        targets: dict[str, DTensor] = {}
        for number, (dtype, shape, source, target) in enumerate(cases):
            full = random_tensor(dtype, shape, number)
            sources[f"t{number}"] = self.distribute(full, *source)
            targets[f"t{number}"] = self.distribute(torch.zeros_like(full), *target)
        await ts.put_state_dict(sources, key, mode=mode)
        dist.barrier()  # every rank has put: the version is whole
        await ts.get_state_dict(key, targets)
        equal = 0
        for number, (dtype, shape, _, target) in enumerate(cases):
            expected = self.distribute(random_tensor(dtype, shape, number), *target).to_local()
            equal += torch.equal(bits(targets[f"t{number}"].to_local()), bits(expected))
        dist.barrier()
        return equal

    @endpoint
    async def put_shard(self, key: str, full: torch.Tensor) -> None:
        """Put this rank's rows of a tensor."""
        await ts.put(key, self.distribute(full, (4,), (Shard(0),)))

    @endpoint
    async def get_shard(self, key: str, full: torch.Tensor) -> bool:
        """Get this rank's columns of a tensor and check them."""
        target = self.distribute(torch.zeros_like(full), (4,), (Shard(1),))
        assert await ts.get(key, target) is target
        return torch.equal(target.to_local(), self.distribute(full, (4,), (Shard(1),)).to_local())

    def fsdp_model(self, rows: int) -> torch.nn.Module:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(32, rows), torch.nn.ReLU(), torch.nn.Linear(rows, 8))
        for layer in model:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer, mesh=self.mesh((4,)))
        return fully_shard(model, mesh=self.mesh((4,)))

    @endpoint
    async def train_shared(self, rows: int) -> bool:
        """Train two copies of a model, one of them in shared memory: their weights must stay equal."""
        plain, shared = self.fsdp_model(rows), self.fsdp_model(rows)
        if torch.__version__ < "2.10":  # compared as versions are
            shared(torch.zeros(4, 32))  # as docs/howto/publish_in_place.md says
        ts.share_memory_(shared)
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (plain, shared)]
        for step in range(3):
            batch = torch.randn(4, 32, generator=torch.Generator().manual_seed(step))
            for model, optimizer in zip((plain, shared), optimizers, strict=True):
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        locals_ = [value.to_local() for value in shared.state_dict().values()]
        in_shared_memory = all(dataplane.is_shared(local) for local in locals_ if local.numel())
        pairs = zip(plain.state_dict().values(), shared.state_dict().values(), strict=True)
        return in_shared_memory and all(torch.equal(a.to_local(), b.to_local()) for a, b in pairs)

    @endpoint
    async def sync_fsdp(self, key: str, mode: Any) -> bool:
        """Publish FSDP2 weights for a few steps and read them as columns on a mesh of another shape."""
        model = ts.share_memory_(self.fsdp_model(61))
        good = True
        targets = {
            name: self.distribute(torch.zeros(value.shape), (2, 2), (Replicate(), Shard(value.ndim - 1)))
            for name, value in model.state_dict().items()
        }
        for step in range(4):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.to_local().add_(step)
            version = await ts.put_state_dict(model.state_dict(), key, mode=mode)
            await ts.get_state_dict(key, targets, version=("newer_than", version - 1))
            for name, value in model.state_dict().items():
                expected = self.distribute(value.full_tensor(), (2, 2), (Replicate(), Shard(value.ndim - 1)))
                good = good and torch.equal(targets[name].to_local(), expected.to_local())
            await ts.fence(key)
            dist.barrier()
        record = ts.last_sync()
        return good and record is not None and record.plan_hit

    @endpoint
    async def sync_fused(self, key: str, mode: Any) -> list[str]:
        """Publish weights under Hugging Face's names, sharded as FSDP does, and read them as vLLM names and fuses them.

        Three destinations: plain tensors that hold one tensor-parallel rank's shards, the same as DTensors, and a
        fused tensor that is sharded as a whole. The names of what did not arrive bit for bit are returned.
        """
        wrong: list[str] = []
        mesh = self.mesh((4,))
        source = {
            name: distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)
            for name, full in fused.huggingface().items()
        }
        plain = fused.vllm_tensors(self.rank, 4)
        sharded = {name: self.distribute(full, (2, 2), cut) for name, (full, cut) in fused.vllm_sharded(2).items()}
        whole = {"qkv": self.distribute(torch.zeros(fused.QKV_ROWS, fused.HIDDEN), (4,), (Shard(0),))}
        maps = (fused.names_for(self.rank, 4), fused.names_of_shards, fused.names_of_whole)
        for step in range(3):
            for value in source.values():
                value.to_local().add_(step)
            version = await ts.put_state_dict(source, key, mode=mode)
            full = {name: value.full_tensor() for name, value in source.items()}
            for target, names in zip((plain, sharded, whole), maps, strict=True):
                strict = names is not fused.names_of_whole
                for again in (False, True):
                    await ts.get_state_dict(key, target, strict, names=names, version=version)
                    record = ts.last_sync()
                    if record is None or record.plan_hit < again:
                        wrong.append(f"no plan for {names} in step {step}")
            expected = fused.vllm_expected(full, self.rank, 4)
            wrong += [name for name in expected if not torch.equal(bits(plain[name]), bits(expected[name]))]
            expected = fused.vllm_expected(full, self.mesh((2, 2)).get_coordinate()[1], 2)
            wrong += [name for name, value in sharded.items() if not torch.equal(value.to_local(), expected[name])]
            stacked = torch.cat([full[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"])
            mine = self.distribute(stacked, (4,), (Shard(0),)).to_local()
            wrong += ["whole"] * (not torch.equal(whole["qkv"].to_local(), mine))
            dist.barrier()  # every rank has read
            await ts.fence(key)
            dist.barrier()
        return wrong
