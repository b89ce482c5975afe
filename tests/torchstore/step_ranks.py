"""The processes behind `tests.torchstore.steps`: ranks that publish DTensors on sub-meshes, and their readers."""

import asyncio
import os
import random
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from skipper import torchstore as ts
from skipper.control import Actor, ActorMesh, MeshFailure, endpoint, this_host
from skipper.torchstore.algebra.manifest import Mode

MeshKind = Literal["ddp-tp", "hsdp", "ep-dp", "pp-tp"]
KEY = "weights"
LEFT = "left"  # counts in the store of the process group who has left it
TOGETHER = 16  # steps after which ranks wait for each other, as they would in every step of a training
_TIMEOUT_S = 120.0

SHAPES = {"dense": (16, 24), "other": (24, 16), "norm": (48,), "late dense": (16, 24), "late norm": (48,)}
STAGES = (("dense", "other", "norm"), ("late dense", "late norm"))


def weights(name: str, step: int) -> torch.Tensor:
    """What a tensor holds after a step: each element differs from that of every other step."""
    seed = torch.Generator().manual_seed(sorted(SHAPES).index(name))
    return torch.randint(1 << 40, SHAPES[name], generator=seed) + step


def placed(kind: MeshKind, ranks: int) -> dict[str, tuple[DeviceMesh, tuple[Placement, ...]]]:
    """The tensors that the calling rank puts, and on which mesh they lie."""
    axes = {"ddp-tp": ("dp", "tp"), "hsdp": ("replica", "shard"), "ep-dp": ("dp", "ep"), "pp-tp": ("pp", "tp")}[kind]
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=axes)
    if kind == "hsdp":
        return {name: (mesh, (Replicate(), Shard(0))) for name in SHAPES}
    if kind == "ep-dp":
        cuts: dict[str, tuple[str, Placement]] = {
            name: ("dp", Replicate()) if "norm" in name else ("ep", Shard(0)) if "late" in name else ("dp", Shard(0))
            for name in SHAPES
        }
        return {name: (mesh[axis], (cut,)) for name, (axis, cut) in cuts.items()}
    names: tuple[str, ...] = tuple(SHAPES)
    if kind == "pp-tp":
        names = STAGES[mesh["pp"].get_local_rank()]
    return {
        name: (mesh["tp"], (Replicate() if "norm" in name else Shard(1) if name == "other" else Shard(0),))
        for name in names
    }


class StepRank(Actor):
    """One rank of a process group, which is made anew when one of its ranks has died."""

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def join(self, port: int, rank: int, ranks: int, kind: MeshKind) -> None:
        torch.set_num_threads(1)
        if dist.is_initialized():
            dist.destroy_process_group()
        timeout = timedelta(seconds=_TIMEOUT_S)
        store = dist.TCPStore("127.0.0.1", port, ranks, is_master=False, timeout=timeout)
        self.meeting, self.ranks = store, ranks
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
        self.tensors: dict[str, DTensor] = {
            name: distribute_tensor(weights(name, 0), *at, src_data_rank=None)
            for name, at in placed(kind, ranks).items()
        }
        self.zero = {name: tensor.to_local().clone() for name, tensor in self.tensors.items()}

    @endpoint
    async def leave(self) -> None:
        dist.destroy_process_group()

    async def _wait_for_others(self, step: int) -> None:
        """A barrier that ends when a rank is gone: gloo's would wait for its time-out.

        Raises:
            ConnectionError: It is.
        """
        here = f"at step {step}"
        self.meeting.add(here, 1)
        while self.meeting.add(here, 0) < self.ranks:
            if self.meeting.add(LEFT, 0):
                raise ConnectionError("a rank has left")
            await asyncio.sleep(0.01)

    @endpoint
    async def put(self, state: dict[str, Any], **options: Any) -> int | str:
        """Put plain tensors. Returns the version, or the name of the store's error."""
        try:
            return await ts.put_state_dict(state, KEY, timeout=_TIMEOUT_S, **options)
        except ts.StoreError as error:
            return type(error).__name__

    @endpoint
    async def put_step(self, step: int, **options: Any) -> int | str:
        """Put this rank's DTensors as they are after a step."""
        for name, tensor in self.tensors.items():
            tensor.to_local().copy_(self.zero[name] + step)
        try:
            return await ts.put_state_dict(self.tensors, KEY, timeout=_TIMEOUT_S, **options)
        except ts.StoreError as error:
            return type(error).__name__

    @endpoint
    async def fence(self) -> None:
        await ts.fence(KEY, timeout=_TIMEOUT_S)

    @endpoint
    async def publish(self, start: int, stop: int, mode: Mode, delay_s: float, keep: int | None) -> str:
        """Put steps up to ``stop``, with random pauses. Says why it ended: "" or a peer's death."""
        dice = random.Random()
        for step in range(start, stop + 1):
            await asyncio.sleep(dice.random() * delay_s)
            try:
                if mode == "direct":
                    await ts.fence(KEY, timeout=_TIMEOUT_S)
                for name, tensor in self.tensors.items():
                    tensor.to_local().copy_(self.zero[name] + step)
                await ts.put_state_dict(self.tensors, KEY, mode=mode, keep=keep, timeout=_TIMEOUT_S)
                if step % TOGETHER == 0:
                    await self._wait_for_others(step)
            except (ts.LateShareError, ts.StoreRendezvousError, ConnectionError) as error:
                self.meeting.add(LEFT, 1)
                return f"{type(error).__name__}: {error}"
        return ""


@dataclass(slots=True)
class Seen:
    """What one reader has read.

    Attributes:
        steps: By version: the step whose weights it holds, bit for bit.
        mixed: A line for each version that holds those of none.
        longest_s: The longest that it waited for a version.
        errors: Kinds of errors that a reader may get while publishers die (direct mode), counted.
    """

    steps: dict[int, int] = field(default_factory=dict)
    mixed: list[str] = field(default_factory=list)
    longest_s: float = 0.0
    errors: int = 0


class StepReader(Actor):
    """Reads every version that it can."""

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def watch(self, stop: int, mode: Mode) -> Seen:
        """Read until the weights are those of step ``stop``."""
        torch.set_num_threads(1)
        seen, newest = Seen(), 0
        while stop not in seen.steps.values() and not seen.mixed:
            begun = time.monotonic()
            try:
                state = await ts.get_state_dict(KEY, version=("newer_than", newest), timeout=_TIMEOUT_S)
            except (ts.SourceChangedError, ts.PublisherLostError):
                seen.errors += 1
                await asyncio.sleep(0.05)
                continue
            seen.longest_s = max(seen.longest_s, time.monotonic() - begun)
            record = ts.last_sync()
            assert record is not None
            between = range(newest + 1, record.version) if mode == "snapshot" else ()
            newest = record.version
            prove(seen, newest, state)
            for number in between:
                try:
                    prove(seen, number, await ts.get_state_dict(KEY, version=number, timeout=_TIMEOUT_S))
                except ts.KeyNotFoundError:  # given up, or not kept any more
                    continue
        return seen


def prove(seen: Seen, version: int, state: dict[str, Any]) -> None:
    names = sorted(SHAPES)
    step = int(state[names[0]].reshape(-1)[0] - weights(names[0], 0).reshape(-1)[0]) if set(names) == set(state) else -1
    if step < 0 or any(not torch.equal(state[name], weights(name, step)) for name in names):
        said = {name: sorted(set((state[name] - weights(name, 0)).unique().tolist())) for name in state}
        seen.mixed.append(f"version {version}: {said}")
    else:
        seen.steps[version] = step


class Nursery(Actor):
    """Owns the processes, takes deaths calmly and replaces the dead."""

    def __supervise__(self, failure: MeshFailure) -> bool:
        return True

    @endpoint
    async def spawn(self, name: str, what: type[StepRank] | type[StepReader]) -> ActorMesh[Any]:
        procs = this_host().spawn_procs(per_host={"gpus": 1})
        return procs.spawn(name, what)
